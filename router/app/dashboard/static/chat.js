// A conversation with the model, streamed. The page knows from the feed on which instance an answer runs.

import { askForKey, events, headers } from "./feed.js";
import * as pictures from "./pictures.js";

const log = document.getElementById("chat-log");
const form = document.getElementById("chat-form");
const text = document.getElementById("chat-text");
const send = document.getElementById("chat-send");
const mode = document.getElementById("chat-mode");

let messages = [];
let running = null; // {id, note, ranks, abort}
const looked = { model: null, sees: false, under: false }; // what the endpoint has told of the model

const newId = () => `page-${Array.from(crypto.getRandomValues(new Uint8Array(6)), (byte) => byte.toString(16).padStart(2, "0")).join("")}`;

function say(who, content = "", taken = []) {
  const box = document.createElement("div");
  box.className = `said ${who}`;
  for (const { url, name } of taken) box.append(Object.assign(document.createElement("img"), { src: url, alt: name }));
  const words = document.createElement("span");
  words.textContent = content;
  const note = document.createElement("small");
  box.append(words, note);
  log.append(box);
  log.scrollTop = log.scrollHeight;
  return { box, words, note };
}

function body(content) {
  const common = {
    stream: true,
    temperature: Number(document.getElementById("chat-temperature").value),
    stream_options: { include_usage: true },
  };
  const most = Number(document.getElementById("chat-tokens").value);
  return mode.value === "chat"
    ? { ...common, messages, max_completion_tokens: most }
    : { ...common, prompt: content, max_tokens: most };
}

async function post(path, content, id, signal) {
  for (;;) {
    const response = await fetch(path, {
      method: "POST", signal, body: JSON.stringify(body(content)),
      headers: { "Content-Type": "application/json", "X-Request-Id": id, ...headers() },
    });
    if (response.status !== 401) return response;
    await askForKey();
  }
}

// Content of a message: pictures, if there are some, before its text.
function contentOf(content, taken) {
  if (!taken.length) return content;
  const parts = taken.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

async function answer(content, taken) {
  const id = newId(), conversation = messages, abort = new AbortController();
  const { box, words, note } = say("assistant");
  running = { id, note, ranks: [], abort };
  send.textContent = "Stop";
  let whole = "", thought = "", usage = null, refused = false;
  try {
    const response = await post(mode.value === "chat" ? "v1/chat/completions" : "v1/completions", content, id, abort.signal);
    if (!response.ok) {
      refused = true;
      const error = (await response.json().catch(() => null))?.error;
      throw new Error(error?.message ?? `HTTP ${response.status}`);
    }
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices?.[0];
      thought += choice?.delta?.reasoning ?? "";
      whole += choice?.delta?.content ?? choice?.text ?? "";
      usage = event.usage ?? usage;
      words.textContent = thought && whole ? `${thought}\n\n${whole}` : thought + whole;
      log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      box.classList.add("problem");
      words.textContent = whole ? `${whole}\n${error.message}` : error.message;
    }
  }
  if (conversation === messages && mode.value === "chat") {
    if (refused && taken.length) { // or each message after it would be refused for its pictures
      messages.pop();
      pictures.giveUp(taken);
    } else messages.push({ role: "assistant", content: whole });
  }
  box.dataset.done = "true";
  note.textContent = [note.textContent, usage ? `${usage.completion_tokens} tokens` : ""].filter(Boolean).join(" · ");
  running = null;
  send.textContent = "Send";
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) {
    running.abort.abort();
    return;
  }
  const content = mode.value === "chat" ? text.value.trim() : text.value;
  if (pictures.isReading() || !(content.trim() || pictures.count())) return;
  const taken = pictures.take();
  text.value = "";
  say("user", content, taken);
  if (mode.value === "chat") messages.push({ role: "user", content: contentOf(content, taken) });
  answer(content, taken);
});

text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    form.requestSubmit();
  }
});

function restart() {
  running?.abort.abort();
  messages = [];
  log.replaceChildren();
  pictures.clear();
  allowPictures();
}
document.getElementById("chat-new").addEventListener("click", restart);
mode.addEventListener("change", restart);

function allowPictures() {
  pictures.allow(
    mode.value !== "chat" ? "Pictures go with a chat only." : looked.sees ? ""
      : looked.model ? `${looked.model} takes text only.` : "Nothing is known of the model yet.",
  );
}
pictures.watch(document.querySelector(".chat"), text);
allowPictures();

// Ask what the model sees, once for each model; a later frame asks again if that failed.
export async function showModel(frame) {
  if (!frame.model || frame.model === looked.model || looked.under) return;
  looked.under = true;
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) return;
    const card = (await response.json()).data.find((one) => one.id === frame.model);
    looked.model = frame.model;
    looked.sees = Boolean(card?.input_modalities?.includes("image"));
    allowPictures();
  } catch (error) {
    console.debug(error);
  } finally {
    looked.under = false;
  }
}

// Where the answer under way runs, and where it was before.
export function showPlace(frame) {
  const found = running && frame.requests.find((one) => one.request_id.includes(running.id));
  if (!found || found.rank === null) return;
  if (running.ranks.at(-1) !== found.rank) running.ranks.push(found.rank);
  running.note.textContent = `instance ${running.ranks.join(" → ")}`;
}

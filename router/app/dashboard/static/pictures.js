// Pictures that go with the next message: pasted, dropped or chosen, shown small, and taken away again.

const KINDS = { "image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WebP", "image/gif": "GIF" };
const MIB = 2 ** 20;
const MOST_BYTES = 5 * MIB; // of a conversation: a router takes 8 MiB unless told otherwise, and base64 adds a third
const MOST_PICTURES = 16; // of a conversation, as routers take unless told otherwise

const list = document.getElementById("chat-pictures");
const problem = document.getElementById("chat-problem");
const chooser = document.getElementById("chat-files");
const button = document.getElementById("chat-picture");

let refusal = "Nothing is known of the model yet."; // why no picture is taken now; empty: they are
let held = []; // pictures of the conversation: {size, name, url, sent, box}, url empty while a file is read

function tell(what) {
  problem.textContent = what;
  problem.hidden = !what;
}

function show(picture) {
  picture.box = document.createElement("span");
  picture.box.className = "picture";
  const image = Object.assign(document.createElement("img"), { src: picture.url, alt: picture.name });
  const remove = Object.assign(document.createElement("button"), { type: "button", textContent: "×", title: "Remove" });
  remove.setAttribute("aria-label", `Remove ${picture.name}`);
  remove.addEventListener("click", () => drop(picture));
  picture.box.append(image, remove);
  list.append(picture.box);
}

function drop(picture) {
  held = held.filter((one) => one !== picture);
  picture.box?.remove();
  tell("");
}

function problemOf(file) {
  if (refusal) return refusal;
  const name = file.name || "The picture";
  if (!(file.type in KINDS)) return `${name} is ${file.type || "of no known kind"}: send ${Object.values(KINDS).join(", ")}.`;
  if (!file.size) return `${name} is empty.`;
  if (held.length === MOST_PICTURES) return `A conversation has ${MOST_PICTURES} pictures at most: remove one, or begin a new one.`;
  const before = held.reduce((sum, one) => sum + one.size, 0);
  if (before + file.size <= MOST_BYTES) return "";
  const most = `${MOST_BYTES / MIB} MiB`, size = `${(file.size / MIB).toFixed(1)} MiB`;
  return file.size > MOST_BYTES ? `${name} has ${size}, more than the ${most} that a conversation may have: make it smaller.`
    : `With ${name} (${size}) this conversation has more than ${most} of pictures: remove one, or begin a new one.`;
}

// Take files as pictures of the next message; says why not of the last one that cannot be.
export function offer(files) {
  tell("");
  for (const file of files) {
    const wrong = problemOf(file);
    if (wrong) {
      tell(wrong);
      continue;
    }
    const picture = { size: file.size, name: file.name || "picture", url: "", sent: false, box: null };
    const reader = new FileReader();
    reader.addEventListener("load", () => {
      if (!held.includes(picture)) return; // a new conversation has begun
      picture.url = reader.result;
      show(picture);
    });
    reader.addEventListener("error", () => {
      drop(picture);
      tell(`${picture.name} cannot be read: ${reader.error.message}`);
    });
    held.push(picture);
    reader.readAsDataURL(file);
  }
}

// Whether a file is still being read; then the message waits.
export const isReading = () => held.some((one) => !one.url);

export const count = () => held.filter((one) => !one.sent).length;

// Pictures of the message that is sent now; they go on to count against the conversation.
export function take() {
  const taken = held.filter((one) => !one.sent);
  for (const one of taken) one.sent = true;
  list.replaceChildren();
  tell("");
  return taken;
}

// A message that was refused has left the conversation, and its pictures with it.
export function giveUp(taken) {
  held = held.filter((one) => !taken.includes(one));
}

export function clear() {
  held = [];
  list.replaceChildren();
  tell("");
}

// Whether the page takes pictures now; `why` says why not.
export function allow(why) {
  refusal = why;
  button.hidden = Boolean(why);
  if (why) clear();
}

button.addEventListener("click", () => chooser.click());
chooser.addEventListener("change", () => {
  offer(chooser.files);
  chooser.value = "";
});

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
export function watch(area, text) {
  text.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    // Office programs put a picture beside the text that was copied: the text is meant.
    if (!files.length || event.clipboardData.getData("text/plain")) return;
    event.preventDefault();
    offer(files);
  });
  area.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  area.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault(); // or the browser leaves the page for the file
    offer(event.dataTransfer.files);
  });
}

// The stream of frames, the API key, and what is asked of the endpoint. Everything goes to where the page is from.

const KEY = "lockstep-api-key";
const RETRY_FIRST = 500, RETRY_MOST = 8000; // milliseconds

export function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Ask for the key until the dialog is closed with one.
export async function askForKey() {
  const dialog = document.getElementById("key");
  const text = document.getElementById("key-text");
  document.getElementById("key-problem").hidden = !sessionStorage.getItem(KEY);
  sessionStorage.removeItem(KEY);
  text.value = "";
  while (!text.value.trim()) {
    if (!dialog.open) dialog.showModal();
    await new Promise((done) => dialog.addEventListener("close", done, { once: true }));
  }
  sessionStorage.setItem(KEY, text.value.trim());
}

// Data of each server-sent event of a response, as it comes.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
      const lines = rest.slice(0, end).split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trim()).join("\n");
    }
  }
}

// Follow the mesh for ever: `onFrame` gets frames, `onLink` gets "live" or "lost" and a reason.
export async function follow(onFrame, onLink) {
  let pause = RETRY_FIRST;
  for (;;) {
    try {
      const response = await fetch("dashboard/feed", { headers: headers(), cache: "no-store" });
      if (response.status === 401) {
        await askForKey();
        continue;
      }
      if (!response.ok) throw new Error(`HTTP ${response.status}`);
      for await (const data of events(response)) {
        onFrame(JSON.parse(data));
        onLink("live", "live");
        pause = RETRY_FIRST;
      }
      onLink("lost", "the router ended the stream");
    } catch (error) {
      onLink("lost", "no connection to the router");
      console.debug(error);
    }
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(2 * pause, RETRY_MOST);
  }
}

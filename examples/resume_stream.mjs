// Client whose stream survives the death of the router that it is connected to, as resume_stream.py:
//
//     node examples/resume_stream.mjs http://localhost:8000 lockstep-moe
const [url = "http://localhost:8000", model = "lockstep-moe"] = process.argv.slice(2);
const name = crypto.randomUUID();
let last = "";

async function read(answer) {
  if (!answer.ok) throw new Error(await answer.text());
  let rest = "";
  for await (const part of answer.body.pipeThrough(new TextDecoderStream())) {
    const events = (rest + part).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      last = /^id: (.*)$/m.exec(event)?.[1] ?? last;
      const data = /^data: (.*)$/m.exec(event)?.[1];
      if (data === "[DONE]") return true;
      if (data) process.stdout.write(JSON.parse(data).choices[0].text);
    }
  }
  return false;
}

const headers = { "content-type": "application/json", "x-lockstep-resumable": "1", "x-request-id": name };
const body = JSON.stringify({ model, prompt: "Once upon a time", max_tokens: 1000, stream: true });
let ask = () => fetch(`${url}/v1/completions`, { method: "POST", headers, body });
for (;;) {
  try {
    if (await read(await ask())) break;
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // fetch and its body throw this where a connection breaks
  }
  await new Promise((done) => setTimeout(done, 200));
  ask = () => fetch(`${url}/v1/streams/cmpl-${name}`, { headers: last ? { "last-event-id": last } : {} });
}
console.log();

// A search on the server: its request goes out, its events come in.

const PATH = "v1/searches";
const LOADING = 503; // the status of a server whose models are not there yet
const PATIENCE = 2000; // milliseconds until it is asked again

// What the server has: names of its models, the searches that run; null where it does not say.
export async function servedModels(token) {
  for (;;) {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const response = await fetch("v1/server", { headers }).catch(() => null);
    if (response?.status !== LOADING) return response?.ok ? response.json() : null;
    await new Promise((resolve) => setTimeout(resolve, PATIENCE));
  }
}

// Runs one search and hands its events over as they arrive: `onEvent(name, data)`.
//
// Throws an Error whose message can be shown; an AbortError once `signal` is aborted, which ends the search.
export async function solve(request, token, signal, onEvent) {
  const headers = { "Content-Type": "application/json", Accept: "text/event-stream" };
  if (token) headers.Authorization = `Bearer ${token}`;
  const response = await fetch(PATH, { method: "POST", headers, body: JSON.stringify(request), signal });
  if (!response.ok) throw new Error(await reasonOf(response));
  let over = false;
  for await (const { name, data } of eventsOf(response.body)) {
    const values = JSON.parse(data);
    if (name === "error") throw new Error(messageOf(values.error));
    onEvent(name, values);
    over ||= name === "result";
  }
  if (!over) throw new Error("The connection ended before the result.");
}

// The events of a text/event-stream; see https://html.spec.whatwg.org/multipage/server-sent-events.html.
export async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = { name: "message", data: [] };
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (event.data.length) yield { name: event.name, data: event.data.join("\n") };
        event = { name: "message", data: [] };
        continue;
      }
      const [, field, text] = line.match(/^([^:]*):? ?(.*)$/s);
      if (field === "event") event.name = text;
      if (field === "data") event.data.push(text);
    }
  }
}

async function reasonOf(response) {
  try {
    return messageOf((await response.json()).error);
  } catch {
    return `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  }
}

function messageOf(error) {
  const named = !error.param || error.message.includes(error.param);
  return named ? error.message : `${error.param}: ${error.message}`;
}

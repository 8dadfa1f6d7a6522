// The server this page came from: its models, and answers as they are made.

const KEY = "infinilm.key";

/** What went wrong, in words for the reader; status 0 means that the server could not be reached. */
export class ServerError extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    Object.assign(this, { status, retryAfter });
  }
}

let key = storedKey();

function storedKey() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null; // a browser told to keep nothing: the key holds until the page is left
  }
}

export const hasKey = () => Boolean(key);

export function keepKey(text) {
  key = text;
  try {
    sessionStorage.setItem(KEY, text);
  } catch {
    // as above
  }
}

// Headers are bytes, each given as a character: a key goes in UTF-8, as other clients send it.
const inBytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${inBytes(key)}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

const USUAL = {
  401: "The server asks for a key.",
  429: "The server is busy.",
  503: "The model is still being loaded.",
};

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const said = typeof body?.error === "string" ? body.error : body?.error?.message;
  const message = said || USUAL[response.status] || `The server answered with status ${response.status}.`;
  return new ServerError(message, response.status, secondsUntil(response.headers.get("Retry-After")));
}

/** Retry-After is a number of seconds or a date. */
function secondsUntil(text) {
  if (!text) return null;
  const seconds = /^\d+$/.test(text) ? Number(text) : (Date.parse(text) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, Math.ceil(seconds)) : null;
}

export async function models() {
  const { data } = await (await request("v1/models")).json();
  return data;
}

/** Each JSON object of an answer's stream, in turn. An error in it, or an end too early, is thrown. */
export async function* answer(body, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true }, return_progress: true };
  const headers = { "Content-Type": "application/json" };
  const sent = { method: "POST", headers, body: JSON.stringify(asked), signal };
  const response = await request("v1/chat/completions", sent);
  for await (const data of events(response.body)) {
    if (data.startsWith("[DONE]")) return;
    const chunk = parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? String(chunk.error), response.status);
    yield chunk;
  }
  throw new ServerError("The connection ended before the answer did.", response.status);
}

function parse(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ServerError("The server sent something that is not JSON.");
  }
}

/** The data of server-sent events; comments and other fields are passed over. */
async function* events(stream) {
  let data = [];
  for await (const line of lines(stream)) {
    if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (!line && data.length) {
      yield data.join("\n");
      data = [];
    }
  }
}

async function* lines(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) return;
      const found = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = found.pop();
      for (const line of found) yield line.endsWith("\r") ? line.slice(0, -1) : line;
    }
  } finally {
    reader.cancel().catch(() => {}); // the reader left: the server is told, and stops
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection was lost before the answer was complete.");
  }
}

// Conversations, kept in this browser: one entry of localStorage each, so that a save writes one of them.

const THEME = "infinilm.theme";
const PREFIX = "infinilm.conversation.";

export const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

export function create(settings = {}) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, settings: { ...settings }, messages: [] };
}

// Not crypto.randomUUID: a page over plain HTTP from another machine has none.
const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(36)).join("");

/** All that are kept, the latest first. */
export function list() {
  const keys = orElse(() => Object.keys(localStorage), []).filter((key) => key.startsWith(PREFIX));
  return keys.map(read).filter(Boolean).sort((a, b) => b.updated - a.updated);
}

export const load = (id) => read(PREFIX + id);
export const isKey = (key) => key === null || key.startsWith(PREFIX);
export const isKeyOf = (key, { id }) => key === PREFIX + id;
export const remove = (id) => orElse(() => localStorage.removeItem(PREFIX + id));

/** Whether there was room for it */
export const save = (conversation) => keep(PREFIX + conversation.id, JSON.stringify(conversation));

export const theme = () => orElse(() => localStorage.getItem(THEME), null);
export const keepTheme = (name) => keep(THEME, name);

const keep = (key, text) => orElse(() => (localStorage.setItem(key, text), true), false);

/** A browser may be told to keep nothing: then localStorage itself throws. */
function orElse(use, otherwise) {
  try {
    return use();
  } catch {
    return otherwise;
  }
}

/** Storage may hold anything: what is not a conversation is passed over. */
function read(key) {
  const found = orElse(() => JSON.parse(localStorage.getItem(key)), null);
  if (!found || PREFIX + found.id !== key || !Array.isArray(found.messages)) return null;
  if (!found.messages.every(isMessage)) return null;
  return { ...found, title: String(found.title ?? ""), settings: { ...found.settings } };
}

const isMessage = (message) =>
  ["user", "assistant"].includes(message?.role) && typeof message.content === "string";

/** The first words of the first message, until the reader gives it a name */
export function titleOf(conversation) {
  const first = conversation.messages[0]?.content.trim().split("\n")[0] ?? "";
  const short = first.length > 60 ? beginning(first, 60).replace(/\s+\S*$/, "") + "…" : first;
  return conversation.title || short || "New conversation";
}

/** So many units of a text, less the first half of an emoji that would be cut in two */
export const beginning = (text, count) => text.slice(0, count).replace(/\p{Cs}$/u, "");

/** The body of a request for the next answer */
export function bodyOf({ settings, messages }, model) {
  const system = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
  const body = { messages: [...system, ...said(messages)] };
  if (model) body.model = model;
  for (const name of NUMBERS) if (settings[name] != null) body[name] = settings[name];
  return body;
}

// Templates want question and answer in turn: an answer that never came joins the questions around it.
function said(messages) {
  const turns = [];
  for (const { role, content } of messages.filter(({ content }) => content)) {
    if (turns.at(-1)?.role === role) turns.at(-1).content += `\n\n${content}`;
    else turns.push({ role, content });
  }
  return turns;
}

export function asMarkdown(conversation) {
  const { system } = conversation.settings;
  const parts = [`# ${titleOf(conversation)}`];
  if (system?.trim()) parts.push("## System", system);
  for (const { role, content } of conversation.messages) {
    parts.push(role === "user" ? "## You" : "## Answer", content);
  }
  return parts.join("\n\n") + "\n";
}

export const asJson = (conversation) =>
  JSON.stringify({ ...conversation, title: titleOf(conversation) }, null, 2) + "\n";

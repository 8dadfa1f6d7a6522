// The chat page: what is shown, and what the reader does. Nothing here or below makes elements out of text.

import { answer, hasKey, keepKey, models, ServerError } from "./chat.js";
import * as store from "./conversations.js";
import { LiveAnswer, reasoningNode } from "./live.js";
import { element, MarkdownView } from "./markdown.js";
import { $, ask, copy, fitText, iconButton, showIcon, showWord } from "./parts.js";

const isNarrow = matchMedia("(max-width: 800px)");

let conversation = store.create();
let running = null; // {conversation, message, controller, live, ...} while an answer is made

/** A line above the messages; `subject` tells whose it is. */
function about(subject, text) {
  const [said] = $("notice").children;
  $("notice").dataset.about = subject;
  if (said.textContent !== text) said.textContent = text; // writing it anew would read it aloud anew
  $("notice").hidden = !text;
}

// --- the model ---------------------------------------------------------------------------------------------

const NO_KEY = "Without its key the server does not answer. Send a message or reload the page to enter it.";
const LOADING = "The model is being loaded. This page goes on by itself.";

async function connect() {
  try {
    showModels(await models());
    if ($("notice").dataset.about === "server") about("server", "");
  } catch (error) {
    if (error.status === 401) return (await askForKey()) ? connect() : about("server", NO_KEY);
    about("server", error.status === 503 ? LOADING : `${error.message} Trying again.`);
    setTimeout(connect, 1000);
  }
}

function showModels(found) {
  const before = $("model").value;
  const option = ({ id }) => element("option", { value: id, textContent: shortName(id) });
  $("model").replaceChildren(...found.map(option));
  if (found.some(({ id }) => id === before)) $("model").value = before;
  $("model").disabled = found.length < 2;
  for (const name of store.NUMBERS) $(name).placeholder = found[0]?.default_sampling?.[name] ?? "";
  const length = found[0]?.max_model_len;
  const room = length ? `, which reads up to ${length.toLocaleString("en")} tokens` : "";
  $("about").textContent = found.length ? `You are talking with ${shortName(found[0].id)}${room}.` : "";
}

const shortName = (id) => id.split("/").at(-1);

let asking = null; // one question for the key, however many requests need it

function askForKey() {
  const text = hasKey() ? "The last one was not accepted." : "It is kept until this tab is closed.";
  const question = { title: "This server asks for a key", text, action: "Continue", type: "password" };
  asking ??= ask(question).then((key) => {
    asking = null;
    if (key) keepKey(key.trim());
    return Boolean(key);
  });
  return asking;
}

// --- conversations -----------------------------------------------------------------------------------------

const NO_ROOM = "The browser has no room to keep this conversation. Export it, or delete others.";

function save(changed = conversation) {
  changed.updated = Date.now();
  if (!store.save(changed)) about("storage", NO_ROOM);
  else if ($("notice").dataset.about === "storage") about("", "");
}

function show(chosen) {
  conversation = chosen;
  showHash();
  showSettings();
  showMessages();
  showList();
}

function open(chosen) {
  show(chosen);
  stickToEnd();
}

function listItem(kept) {
  const title = store.titleOf(kept);
  const button = element("button", { type: "button", dir: "auto", textContent: title, title });
  button.dataset.id = kept.id;
  button.onclick = () => chooseConversation(kept.id);
  if (kept.id === conversation.id) button.setAttribute("aria-current", "page");
  return element("li", {}, [button]);
}

function showList() {
  const list = $("conversations");
  const focused = list.querySelector(":focus")?.dataset.id;
  list.replaceChildren(...store.list().map(listItem));
  list.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
  $("title").textContent = store.titleOf(conversation);
  document.title = conversation.messages.length ? `${store.titleOf(conversation)} · infinilm` : "infinilm";
}

const find = (id) => (running?.conversation.id === id ? running.conversation : store.load(id));

function chooseConversation(id) {
  const chosen = find(id);
  if (chosen) open(chosen);
  closeSidebar();
  if (!isNarrow.matches) $("prompt").focus();
}

function startConversation() {
  open(store.create(conversation.settings));
  closeSidebar();
  $("prompt").focus();
}

async function renameConversation() {
  const renamed = conversation;
  const value = store.titleOf(renamed);
  const title = await ask({ title: "Rename the conversation", action: "Rename", type: "text", value });
  if (title === null) return;
  renamed.title = title.trim();
  if (renamed.messages.length) save(renamed);
  showList();
}

async function deleteConversation() {
  const deleted = conversation;
  const text = `“${store.titleOf(deleted)}” will be gone for good.`;
  if ((await ask({ title: "Delete the conversation?", text, action: "Delete" })) === null) return;
  if (running?.conversation === deleted) {
    running.isDeleted = true;
    stop();
  }
  store.remove(deleted.id);
  if (deleted.id === conversation.id) open(store.list()[0] ?? store.create(deleted.settings));
  else showList();
}

function download(text, type, ending) {
  const words = store.titleOf(conversation).match(/[\p{L}\p{M}\p{N}]+/gu) ?? ["conversation"];
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: `${store.beginning(words.join("-"), 40)}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// --- settings ----------------------------------------------------------------------------------------------

function showSettings() {
  $("system").value = conversation.settings.system ?? "";
  for (const name of store.NUMBERS) $(name).value = conversation.settings[name] ?? "";
}

function readSettings() {
  conversation.settings.system = $("system").value;
  for (const name of store.NUMBERS) {
    const field = $(name);
    conversation.settings[name] = field.value === "" || !field.checkValidity() ? null : field.valueAsNumber;
  }
  if (conversation.messages.length) save();
}

// --- messages ----------------------------------------------------------------------------------------------

/** What is shown already stays: a long conversation is not drawn anew for each message. */
function showMessages() {
  const { messages } = conversation;
  const nodes = [...$("messages").children];
  const isOther = (node, i) => node.message !== messages[i] || node.querySelector(".editor");
  const changed = nodes.findIndex(isOther);
  const same = changed < 0 ? nodes.length : changed;
  nodes.slice(same).forEach((node) => node.remove());
  $("messages").append(...messages.slice(same).map(messageNode));
  $("welcome").hidden = messages.length > 0;
  showRunning();
}

function messageNode(message) {
  const node = element("article", { className: message.role, message });
  node.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
  if (running?.message !== message) fill(node, message);
  else {
    running.live = new LiveAnswer(node);
    running.live.draw(message, running.progress);
  }
  return node;
}

function fill(node, message) {
  const body = element("div", { className: "body" });
  if (message.role === "user") Object.assign(body, { dir: "auto", textContent: message.content });
  else new MarkdownView(body).update(message.content);
  const thought = message.reasoning ? [reasoningNode(message.reasoning)] : [];
  node.replaceChildren(...thought, body, ...remarks(message), belowMessage(message));
}

/** Why an answer is not whole, if it is not */
function remarks(message) {
  if (message.role === "user") return [];
  if (message.error) {
    const said = element("p", { className: "remark error", textContent: message.error });
    said.append(tryAgain(message));
    return [said];
  }
  const why = { length: "Stopped at the limit of tokens.", stopped: "Stopped." };
  const text = message.finish ? why[message.finish] : "Interrupted.";
  return text ? [element("p", { className: "remark", textContent: text })] : [];
}

/** A button that waits as long as the server asked for. */
function tryAgain(message) {
  const button = element("button", { type: "button", className: "last", onclick: () => regenerate(message) });
  const tick = () => {
    const left = Math.ceil(((message.retryAt ?? 0) - Date.now()) / 1000);
    button.disabled = left > 0;
    button.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
    if (left > 0) setTimeout(() => button.isConnected && tick(), 250);
  };
  tick();
  return button;
}

function belowMessage(message) {
  const tools = [
    iconButton("copy", "Copy", (event) => copy(message.content, event.currentTarget, showIcon)),
    iconButton("edit", "Edit", () => edit(message)),
    ...(message.role === "assistant" ? [againButton(message)] : []),
  ];
  if (!message.content) tools.splice(0, message.error ? 3 : 2); // nothing to copy; an error has its own button
  const stats = element("span", { className: "stats", textContent: statsText(message.stats) });
  return element("div", { className: "below" }, [element("div", { className: "tools" }, tools), stats]);
}

/** Shown below the last message alone, so that nothing that follows is lost */
function againButton(message) {
  const button = iconButton("again", "Regenerate", () => regenerate(message));
  button.classList.add("last");
  return button;
}

function statsText(stats) {
  if (!stats) return "";
  const parts = [];
  if (stats.perSecond) parts.push(`${stats.perSecond.toFixed(1)} tokens/s`);
  if (stats.firstToken != null) parts.push(`first token after ${duration(stats.firstToken)}`);
  if (stats.tokens) parts.push(`${stats.tokens.toLocaleString("en")} tokens`);
  return parts.join(" · ");
}

const duration = (ms) => (ms < 999.5 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

const nodeOf = (message) => $("messages").children[conversation.messages.indexOf(message)];

/** Its text in a box; going on from there drops what follows. */
function edit(message) {
  if (running) return;
  const node = nodeOf(message);
  const isQuestion = message.role === "user";
  const box = element("textarea", { value: message.content, rows: 1, oninput: () => fitText(box) });
  box.setAttribute("aria-label", "Edit the message");
  const cancel = () => {
    fill(node, message);
    node.querySelector(".tools button:nth-child(2)").focus();
  };
  const form = element("form", { className: "editor" }, [box, editorRow(message, cancel)]);
  form.onsubmit = (event) => {
    event.preventDefault();
    applyEdit(message, box.value);
  };
  box.onkeydown = (event) => {
    if (isEscape(event)) cancel();
    else if (isQuestion && isSend(event)) form.onsubmit(event);
  };
  node.replaceChildren(form);
  fitText(box);
  box.focus();
}

function editorRow(message, cancel) {
  const follows = conversation.messages.at(-1) === message ? "" : "What follows is replaced.";
  const action = message.role === "user" ? "Send" : "Save";
  return element("div", { className: "row" }, [
    element("span", { className: "fine", textContent: follows }),
    element("button", { type: "button", className: "quiet", textContent: "Cancel", onclick: cancel }),
    element("button", { type: "submit", className: "strong", textContent: action }),
  ]);
}

function applyEdit(message, content) {
  if (running || !content.trim()) return;
  conversation.messages.splice(conversation.messages.indexOf(message));
  if (message.role === "user") return send(content);
  conversation.messages.push({ role: "assistant", content, finish: "edited" });
  save();
  showMessages();
  $("prompt").focus();
}

function regenerate(message) {
  if (!isFree()) return;
  conversation.messages.splice(conversation.messages.indexOf(message));
  generate(message);
}

function send(content) {
  conversation.messages.push({ role: "user", content });
  save();
  showHash();
  generate();
}

// --- an answer ---------------------------------------------------------------------------------------------

/** Asks for the next answer. If nothing comes of it, the answer it was to replace stays. */
async function generate(replaced = null) {
  const message = { role: "assistant", content: "" };
  const controller = new AbortController();
  const run = { conversation, message, replaced, controller, drawAfter: 0, savedAt: 0 };
  running = run;
  conversation.messages.push(message);
  showMessages();
  showList();
  stickToEnd();
  say("The answer is being written.");
  if (document.activeElement === document.body && !isNarrow.matches) $("prompt").focus();
  await follow(run);
  finish(run);
}

/** Reads the answer into its message; where a key is needed, asks for it and begins again. */
async function follow(run) {
  const body = store.bodyOf(run.conversation, $("model").value);
  run.started = performance.now();
  try {
    for await (const chunk of answer(body, run.controller.signal)) take(run, chunk);
  } catch (error) {
    if (error.status === 401 && (await askForKey())) {
      await connect();
      return follow(run);
    }
    if (error.status === 404) await connect(); // started anew with another model, which a next try asks
    giveUp(run, error);
  }
}

function take(run, chunk) {
  const { message } = run;
  const [choice] = chunk.choices ?? [];
  const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
  const text = choice?.delta?.content ?? "";
  if (text || thought) run.firstAt ??= performance.now();
  if (thought) message.reasoning = (message.reasoning ?? "") + thought;
  message.content += text;
  if (choice?.finish_reason) message.finish = choice.finish_reason;
  run.progress = chunk.prompt_progress ?? run.progress;
  run.tokens = chunk.usage?.completion_tokens ?? run.tokens;
  run.timings = chunk.timings ?? run.timings;
  drawSoon(run);
  saveSometimes(run);
}

/** The server's own figures where it gives them; the time to the first token is the reader's whole wait. */
function statsOf({ started, firstAt, tokens, timings }) {
  if (!firstAt) return undefined;
  const count = timings?.predicted_n ?? tokens;
  const measured = count > 1 ? ((count - 1) / (performance.now() - firstAt)) * 1000 : null;
  const perSecond = timings?.predicted_per_second ?? measured;
  return { firstToken: firstAt - started, tokens: count, perSecond };
}

function giveUp(run, error) {
  const { message, replaced } = run;
  run.isRestored = replaced && !hasBegun(run);
  if (run.isRestored) Object.assign(message, replaced);
  if (error.name !== "AbortError") complain(message, error);
  else if (!run.isRestored) message.finish = "stopped";
}

const hasBegun = ({ message }) => Boolean(message.content || message.reasoning);

function complain(message, error) {
  const isKnown = error instanceof ServerError;
  if (!isKnown) console.error(error);
  message.error = isKnown ? error.message : "Something went wrong on this page.";
  message.retryAt = error.retryAfter ? Date.now() + error.retryAfter * 1000 : null;
}

/** An answer that takes minutes should survive the end of the page. */
function saveSometimes(run) {
  if (performance.now() - run.savedAt < 5000) return;
  run.savedAt = performance.now();
  saveRun(run);
}

/** Until an answer begins, the one it is to replace is what is kept. */
function saveRun(run) {
  if (!run.replaced || hasBegun(run)) save(run.conversation);
}

function finish(run) {
  running = null;
  if ($("notice").dataset.about === "running") about("", "");
  run.message.stats ??= statsOf(run);
  if (!run.isDeleted) save(run.conversation);
  if (run.conversation === conversation) showEnd(run);
  showRunning();
  showList();
  const how = run.message.finish === "stopped" ? "was stopped" : "is complete";
  say(run.message.error ?? `The answer ${how}.`);
}

/** Ends the answer that is being made; what came of it stays. */
function stop() {
  if (document.activeElement === $("stop")) $("prompt").focus();
  running?.controller.abort();
}

const say = (text) => ($("status").textContent = text);

// --- an answer while it is made ----------------------------------------------------------------------------

/** At the next frame; after a costly drawing a while later, so that the page stays free for its reader. */
function drawSoon(run) {
  if (run.isScheduled || run.conversation !== conversation) return;
  run.isScheduled = true;
  const later = () => requestAnimationFrame(() => {
    run.isScheduled = false;
    if (running === run && run.conversation === conversation) draw(run);
  });
  setTimeout(later, Math.max(0, run.drawAfter - performance.now()));
}

function draw(run) {
  const began = performance.now();
  run.live.draw(run.message, run.progress);
  followEnd();
  run.drawAfter = performance.now() + Math.min(1000, 2 * (performance.now() - began));
}

function showEnd(run) {
  const { message, live } = run;
  live.draw(message, null);
  live.end([...remarks(message), belowMessage(message)]);
  if (run.isRestored) fill(live.node, message);
  followEnd();
}

// --- scrolling ---------------------------------------------------------------------------------------------

let isAtEnd = true; // the page follows the answer until the reader scrolls away from it
let lastTop = 0; // where the messages were scrolled to, as far as it is known

function followEnd() {
  if (!isAtEnd) return;
  $("scroller").scrollTop = conversation.messages.length ? $("scroller").scrollHeight : 0;
  lastTop = $("scroller").scrollTop;
}

function stickToEnd() {
  isAtEnd = true;
  $("latest").hidden = true;
  followEnd();
}

$("scroller").onscroll = () => {
  const { scrollHeight, scrollTop, clientHeight } = $("scroller");
  const left = scrollHeight - scrollTop - clientHeight;
  const isUp = scrollTop < lastTop; // the least move up is the reader's wish to stay there
  isAtEnd = isUp ? left < 2 : isAtEnd || left < 48;
  lastTop = scrollTop;
  $("latest").hidden = isAtEnd;
};
// A message box that grows, or a phone's keyboard, does not hide the end.
new ResizeObserver(followEnd).observe($("scroller"));
$("latest").onclick = () => {
  stickToEnd();
  $("prompt").focus();
};

// --- what the reader does ----------------------------------------------------------------------------------

// An input method takes a word with Enter and drops one with Escape: its own keys. Safari shows them by 229.
const isComposing = (event) => event.isComposing || event.keyCode === 229;
const isSend = (event) => event.key === "Enter" && !event.shiftKey && !isComposing(event);
const isEscape = (event) => event.key === "Escape" && !isComposing(event);

function showRunning() {
  const isOwn = running?.conversation === conversation;
  document.body.classList.toggle("busy", Boolean(running));
  $("send").hidden = isOwn;
  $("stop").hidden = !isOwn;
  $("send").disabled = !$("prompt").value.trim();
}

const ELSEWHERE = "An answer is still being written in another conversation.";

/** Whether an answer may be asked for; where another one is in the way unseen, the reader is told. */
function isFree() {
  if (running) about("running", running.conversation === conversation ? "" : ELSEWHERE);
  return !running;
}

function sendPrompt() {
  const text = $("prompt").value;
  if (!text.trim() || !isFree()) return;
  $("prompt").value = "";
  promptChanged();
  send(text);
}

function promptChanged() {
  fitText($("prompt"));
  showRunning();
}

$("composer").onsubmit = (event) => {
  event.preventDefault();
  sendPrompt();
};
$("prompt").oninput = promptChanged;
$("prompt").onkeydown = (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  sendPrompt();
};
$("stop").onclick = stop;
$("welcome").onclick = ({ target }) => {
  if (target.matches(".ideas button") && isFree()) send(target.textContent);
};
$("messages").onclick = ({ target }) => {
  const code = target.matches(".copy") && target.closest("figure").querySelector("code");
  if (code) copy(code.textContent, target, showWord);
};
$("notice").lastElementChild.onclick = () => about("", "");

document.addEventListener("keydown", (event) => {
  if (!isEscape(event) || document.querySelector("dialog[open], :popover-open")) return;
  if (document.body.classList.contains("menu-open")) closeSidebar();
  else if (running?.conversation === conversation) stop();
});

document.querySelector(".skip").onclick = (event) => {
  event.preventDefault();
  $("prompt").focus();
};

// The list of conversations lies over the page where there is no room beside it.
function showSidebar(isOpen) {
  document.body.classList.toggle("menu-open", isOpen);
  $("menu").setAttribute("aria-expanded", String(isOpen));
  $("sidebar").inert = isNarrow.matches && !isOpen;
  if (isOpen) $("new").focus();
}

function closeSidebar() {
  if (document.body.classList.contains("menu-open")) $("menu").focus();
  showSidebar(false);
}

$("menu").onclick = () => showSidebar(!document.body.classList.contains("menu-open"));
$("shade").onclick = closeSidebar;
isNarrow.onchange = () => showSidebar(false);

$("new").onclick = startConversation;
$("rename").onclick = renameConversation;
$("delete").onclick = deleteConversation;
$("export-markdown").onclick = () => download(store.asMarkdown(conversation), "text/markdown", "md");
$("export-json").onclick = () => download(store.asJson(conversation), "application/json", "json");
// Before the action itself, so that a dialog it opens gives the focus back to what is still seen.
$("actions").addEventListener("click", () => $("actions").hidePopover(), { capture: true });

$("tune").onclick = () => $("settings").showModal();
$("settings").oninput = readSettings;
$("settings").onclose = showSettings; // a value that was refused is not shown as if it held
$("settings").onclick = ({ target }) => {
  if (target === $("settings")) $("settings").close(); // beside it; to return false would undo other clicks
};

$("theme").onclick = () => {
  const { dataset } = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const isDark = (dataset.theme || system) === "dark";
  dataset.theme = isDark ? "light" : "dark";
  store.keepTheme(dataset.theme);
};

// --- beginning and end -------------------------------------------------------------------------------------

function showHash() {
  const hash = conversation.messages.length ? `#${conversation.id}` : "";
  if (location.hash !== hash) history.pushState(null, "", hash || location.pathname);
}

function openFromHash() {
  const id = location.hash.slice(1);
  if (id === conversation.id && conversation.messages.length) return;
  const found = find(id);
  if (!found) history.replaceState(null, "", location.pathname); // a new entry would catch who goes back
  open(found ?? store.create(store.list()[0]?.settings));
}

addEventListener("popstate", openFromHash);
addEventListener("pagehide", () => running && saveRun(running));
addEventListener("storage", ({ key }) => {
  if (!store.isKey(key)) return;
  const fresh = store.isKeyOf(key, conversation) && store.load(conversation.id);
  if (!fresh || running || document.querySelector(".editor")) return showList();
  show(fresh);
  followEnd();
});

document.documentElement.dataset.theme = store.theme() ?? "";
showSidebar(false);
openFromHash();
connect();

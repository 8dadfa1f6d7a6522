// Small parts of the page: buttons, a dialog, boxes, the clipboard.

import { element } from "./markdown.js";

export const $ = (id) => document.getElementById(id);

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

export function iconButton(name, label, onclick) {
  const properties = { type: "button", className: "icon", title: label, onclick };
  const button = element("button", properties, [icon(name)]);
  button.setAttribute("aria-label", label);
  return button;
}

/** A question in a dialog: what was typed (or "" where nothing is), null when it was dismissed. */
export function ask({ title, text = "", action, type = null, value = "" }) {
  const dialog = $("ask");
  const [cancel, submit] = dialog.querySelectorAll(".row button");
  dialog.querySelector("h2").textContent = title;
  dialog.querySelector("p").textContent = text;
  submit.textContent = action;
  const hasField = Boolean(type);
  Object.assign($("answer"), { type: type ?? "text", value, hidden: !hasField, required: hasField });
  dialog.showModal();
  return new Promise((resolve) => {
    let result = null;
    cancel.onclick = () => dialog.close();
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      result = $("answer").value;
      dialog.close();
    };
    dialog.onclose = () => resolve(result);
  });
}

export async function copy(text, button, show) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // plain HTTP from another machine: no clipboard interface
  }
  show(button, true);
  setTimeout(() => show(button, false), 1500);
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const area = element("textarea", { value: text, className: "hidden" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused.focus();
}

export const showWord = (button, isDone) => (button.textContent = isDone ? "Copied" : "Copy");
export const showIcon = (button, isDone) => button.replaceChildren(icon(isDone ? "done" : "copy"));

/** A long text keeps the direction it has: to find one, the browser reads all of it at each key. */
export function fitText(box) {
  box.dir = box.value.length < 20000 ? "auto" : getComputedStyle(box).direction;
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight * 0.4)}px`;
}

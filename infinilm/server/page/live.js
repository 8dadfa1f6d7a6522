// An answer while it is made.

import { element, MarkdownView } from "./markdown.js";

/** What a model thought, folded */
export function reasoningNode(text) {
  const body = element("div", { className: "body", dir: "auto" }, [document.createTextNode(text)]);
  const summary = element("summary", { textContent: "Reasoning" });
  return element("details", { className: "reasoning" }, [summary, body]);
}

/** Shows in a node what there is of an answer; before its first token, what it waits for. */
export class LiveAnswer {
  constructor(node) {
    const body = element("div", { className: "body" });
    const label = element("span", { textContent: "Waiting for the first token" });
    const bar = element("progress");
    const waiting = element("div", { className: "waiting" }, [label, bar]);
    Object.assign(this, { node, body, label, bar, waiting, view: new MarkdownView(body), reasoning: null });
    node.replaceChildren(body, waiting);
    node.setAttribute("aria-busy", "true");
  }

  draw({ content, reasoning }, progress) {
    this.view.update(content);
    if (reasoning) this.#drawReasoning(reasoning);
    this.waiting.hidden = content !== "";
    this.bar.hidden = !progress || Boolean(reasoning);
    if (reasoning) this.label.textContent = "Thinking";
    else if (progress) this.#drawProgress(progress);
  }

  #drawReasoning(text) {
    if (!this.reasoning) {
      this.reasoning = reasoningNode("");
      this.body.before(this.reasoning);
    }
    const shown = this.reasoning.lastChild.firstChild;
    shown.appendData(text.slice(shown.length));
  }

  #drawProgress({ total, processed, cache }) {
    Object.assign(this.bar, { max: Math.max(1, total), value: Math.min(processed, total) });
    const known = cache ? ` · ${count(cache)} from the cache` : "";
    this.label.textContent = `Reading the prompt: ${count(processed)} of ${count(total)} tokens${known}`;
  }

  /** What stands below an answer that has ended takes the place of what it waited for. */
  end(nodes) {
    this.waiting.replaceWith(...nodes);
    this.node.removeAttribute("aria-busy");
  }
}

const count = (number) => number.toLocaleString("en");

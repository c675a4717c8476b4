// Tabs and copy buttons for the examples at /docs; without this script all of them are listed.

import { el } from "./dom.js";

const groups = [...document.querySelectorAll(".examples")];

/** Show the example of this title in each of these groups that has one. */
function choose(title, among = groups) {
  for (const group of among) {
    const examples = [...group.querySelectorAll(".example")];
    if (!examples.some((example) => example.dataset.title === title)) continue;
    for (const example of examples) example.hidden = example.dataset.title !== title;
    for (const tab of group.querySelectorAll("[role=tab]")) {
      const chosen = tab.textContent === title;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
    }
  }
}

async function copy(code, button) {
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch { // over plain HTTP from another machine a page has no clipboard
    getSelection().selectAllChildren(code);
    document.execCommand("copy");
    getSelection().removeAllRanges();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

groups.forEach((group, number) => {
  const examples = [...group.querySelectorAll(".example")];
  const tabs = examples.map((example, i) => {
    const title = example.querySelector("h3");
    example.dataset.title = title.textContent;
    example.id = `example-${number}-${i}`;
    example.setAttribute("role", "tabpanel");
    example.setAttribute("aria-label", title.textContent);
    title.hidden = true;
    const button = el("button", { type: "button", class: "copy" }, "Copy");
    button.addEventListener("click", () => copy(example.querySelector("code"), button));
    example.append(button);
    const tab = el("button", { type: "button", role: "tab", "aria-controls": example.id }, title.textContent);
    tab.addEventListener("click", () => choose(title.textContent));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(i + step + tabs.length) % tabs.length];
      choose(next.textContent);
      next.focus();
    });
    return tab;
  });
  group.prepend(el("div", { class: "tabs", role: "tablist", "aria-label": "Language" }, ...tabs));
});
for (const group of groups) choose(group.querySelector("[role=tab]").textContent, [group]);

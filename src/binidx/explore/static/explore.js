// Copyright the binidx authors. SPDX-License-Identifier: Apache-2.0
// The pages work without this file. With it, parts load in place, commands are copied, and keys turn pages.
"use strict";
document.documentElement.classList.add("js");

async function load(part) {
  if (part.dataset.state) return;
  part.dataset.state = "loading";
  try {
    const response = await fetch(part.dataset.src, { headers: { "X-Fragment": "1" } });
    part.innerHTML = await response.text(); // rendered by our server, which escapes all data
    part.querySelectorAll("a[href]").forEach((link) => { // relative to the part, not to this page
      link.href = new URL(link.getAttribute("href"), new URL(part.dataset.src, document.baseURI));
    });
    part.dataset.state = "loaded";
    part.querySelectorAll("[data-load]").forEach(load);
  } catch {
    delete part.dataset.state;
  }
}

document.querySelectorAll("[data-load]").forEach(load);
document.addEventListener("toggle", (event) => {
  const part = event.target.open && event.target.querySelector("[data-src]");
  if (part) load(part);
}, true);
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.previousElementSibling.textContent);
  button.textContent = "copied";
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
  const rel = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const link = rel && document.querySelector(`a[rel=${rel}]`);
  if (link) link.click();
});

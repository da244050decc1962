// Live figures: over a WebSocket where a page offers one (data-live), else htmx goes on polling.
// Either way what is being read stays where it is: scrolled tables, and the focus.
(() => {
  const remembered = new WeakMap();
  const focusable = "a, button, [tabindex]";

  // What an element is, whatever has come or gone before it on the page.
  const nameOf = (one) =>
    one.id || one.getAttribute("aria-label") || one.getAttribute("href") || one.textContent.trim();
  const named = (place, what, name) =>
    [...place.querySelectorAll(what)].find((one) => nameOf(one) === name);

  function remember(place) {
    const active = document.activeElement;
    remembered.set(place, {
      scrolled: [...place.querySelectorAll(".mr-scroll")].map((one) => [
        nameOf(one),
        one.scrollLeft,
      ]),
      focus: active !== place && place.contains(active) ? nameOf(active) : null,
    });
  }

  // A row that has gone must not hand its focus, and the next key press, to another row.
  function restore(place) {
    const was = remembered.get(place);
    if (!was) return;
    for (const [name, left] of was.scrolled) {
      const one = named(place, ".mr-scroll", name);
      if (one) one.scrollLeft = left;
    }
    if (was.focus !== null) named(place, focusable, was.focus)?.focus({ preventScroll: true });
  }

  document.addEventListener("htmx:beforeSwap", (event) => remember(event.detail.target));
  document.addEventListener("htmx:afterSwap", (event) => restore(event.detail.target));

  const place = document.querySelector("[data-live]");
  if (!place || !window.WebSocket) return;
  const address = new URL(place.dataset.live, location.href);
  address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  let socket = null;
  let pause = 1000;

  function open() {
    if (socket || document.visibilityState !== "visible") return;
    const own = (socket = new WebSocket(address));
    own.onmessage = (message) => {
      pause = 1000;
      place.dataset.connected = "yes";
      if (hasSelection()) return;
      remember(place);
      place.innerHTML = message.data;
      restore(place);
    };
    own.onclose = (event) => {
      if (socket === own) socket = null;
      delete place.dataset.connected;
      if (event.code === 4403) return; // may not read it, and will not by asking again
      setTimeout(open, pause);
      pause = Math.min(30000, pause * 2);
    };
  }

  // What somebody is marking to copy is not pulled away.
  function hasSelection() {
    const marked = getSelection();
    return marked.rangeCount > 0 && !marked.isCollapsed && place.contains(marked.anchorNode);
  }

  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") open();
    else if (socket) socket.close();
  });
  open();
})();

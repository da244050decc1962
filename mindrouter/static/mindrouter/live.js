// Live figures: over a WebSocket where a page offers one (data-live), else htmx goes on polling.
// Either way what is being read stays where it is: scrolled tables, and the focus.
(() => {
  const remembered = new WeakMap();
  const focusable = "a, button, [tabindex]";

  function remember(place) {
    const places = [...place.querySelectorAll(focusable)];
    remembered.set(place, {
      scrolled: [...place.querySelectorAll(".mr-scroll")].map((one) => one.scrollLeft),
      id: place.contains(document.activeElement) ? document.activeElement.id : "",
      focus: places.indexOf(document.activeElement),
    });
  }

  function restore(place) {
    const was = remembered.get(place);
    if (!was) return;
    place.querySelectorAll(".mr-scroll").forEach((one, n) => {
      one.scrollLeft = was.scrolled[n] || 0;
    });
    if (was.focus < 0) return;
    // A row that has gone must not hand its focus, and the next key press, to another row.
    const again = was.id
      ? document.getElementById(was.id)
      : place.querySelectorAll(focusable)[was.focus];
    again?.focus({ preventScroll: true });
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

// Loads the console once the page is on the screen: the first paint needs nothing but the page and its style.

const PATIENCE_MS = 500; // a page that nobody looks at is not painted, and some browsers do not tell

function load() {
  document.head.append(document.getElementById("modules").content); // all at once, not one import after the other
  import("./app.js");
}

new PerformanceObserver(load).observe({ type: "paint", buffered: true });
setTimeout(load, PATIENCE_MS);

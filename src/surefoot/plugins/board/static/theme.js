// Before the first paint, so that a dark page never flashes white.
(() => {
  const chosen = localStorage.getItem("theme");
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = chosen || (isDark ? "dark" : "light");
})();

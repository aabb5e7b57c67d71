// A browser in the C or POSIX locale calls its language `en-US@posix`, which Intl refuses and uPlot passes to it at load.

try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}

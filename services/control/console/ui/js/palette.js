// Colours that the colour-blind tell apart: Okabe and Ito's for categories, cividis and a blue-orange scale for numbers.

export const CATEGORIES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442"];
const CIVIDIS = [[0, 34, 78], [50, 68, 110], [104, 105, 115], [148, 141, 118], [200, 184, 102], [254, 232, 56]];
const DIVERGING = [[0, 84, 159], [120, 170, 215], [238, 238, 238], [240, 170, 90], [180, 75, 0]];

/** @param {number[][]} stops @param {number} share 0 to 1 */
function between(stops, share) {
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const i = Math.min(Math.floor(place), stops.length - 2);
  return stops[i].map((low, k) => Math.round(low + (stops[i + 1][k] - low) * (place - i)));
}

/** @param {number[]} rgb */
const css = (rgb) => `rgb(${rgb.join(",")})`;

/** @param {number} share 0 to 1 */
export const sequential = (share) => css(between(CIVIDIS, share));

/** @param {number} share -1 to 1, 0 in the middle */
export const diverging = (share) => css(between(DIVERGING, (share + 1) / 2));

/** @param {number} index */
export const category = (index) => CATEGORIES[index % CATEGORIES.length];

/** Return black or white, whichever is readable on a colour. @param {string} color `rgb(...)` or `#rrggbb` */
export function readable(color) {
  const rgb = color.startsWith("#")
    ? [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16))
    : (color.match(/\d+/g) ?? ["0", "0", "0"]).map(Number);
  return 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 140 ? "#000" : "#fff";
}

// Decoder of the part of msgpack that the service sends.

/** @param {ArrayBuffer} buffer */
export function decode(buffer) {
  const view = new DataView(buffer);
  const text = new TextDecoder();
  let at = 0;

  /** @param {number} size @param {"Uint" | "Int"} [kind] */
  function integer(size, kind = "Uint") {
    at += size;
    return Number(/** @type {any} */ (view)[`get${size === 8 ? "Big" : ""}${kind}${8 * size}`](at - size));
  }
  /** @param {number} length */
  function bytes(length) {
    at += length;
    return buffer.slice(at - length, at);
  }
  /** @param {number} length */
  function array(length) {
    return Array.from({ length }, value);
  }
  /** @param {number} length */
  function map(length) {
    /** @type {Record<string, any>} */
    const out = Object.create(null);
    for (let i = 0; i < length; i++) {
      const key = value();
      out[key] = value();
    }
    return out;
  }
  /** @returns {any} */
  function value() {
    const kind = integer(1);
    if (kind < 0x80) return kind;
    if (kind < 0x90) return map(kind & 15);
    if (kind < 0xa0) return array(kind & 15);
    if (kind < 0xc0) return text.decode(bytes(kind & 31));
    if (kind >= 0xe0) return kind - 256;
    if (kind === 0xc0) return null;
    if (kind === 0xc2 || kind === 0xc3) return kind === 0xc3;
    if (kind >= 0xc4 && kind <= 0xc6) return bytes(integer(1 << (kind - 0xc4)));
    if (kind === 0xca) return (at += 4, view.getFloat32(at - 4));
    if (kind === 0xcb) return (at += 8, view.getFloat64(at - 8));
    if (kind >= 0xcc && kind <= 0xcf) return integer(1 << (kind - 0xcc));
    if (kind >= 0xd0 && kind <= 0xd3) return integer(1 << (kind - 0xd0), "Int");
    if (kind >= 0xd9 && kind <= 0xdb) return text.decode(bytes(integer(1 << (kind - 0xd9))));
    if (kind === 0xdc || kind === 0xdd) return array(integer(kind === 0xdc ? 2 : 4));
    if (kind === 0xde || kind === 0xdf) return map(integer(kind === 0xde ? 2 : 4));
    throw new Error(`msgpack type ${kind} at ${at}`);
  }
  return value();
}

/** Columns of a segment, by the type of their bytes. */
const KINDS = /** @type {Record<string, any>} */ ({
  tokens: Int32Array, versions: Int32Array, mask: Uint8Array, outcome: Uint8Array,
  logprobs: Float32Array, trainer_logprobs: Float32Array, ratio: Float32Array, advantages: Float32Array,
});

/** Decode a trajectory; its columns become typed arrays. @param {ArrayBuffer} buffer */
export function decodeTrajectory(buffer) {
  const body = decode(buffer);
  for (const segment of body.segments) {
    for (const [name, kind] of Object.entries(KINDS)) segment[name] = new kind(segment[name]);
  }
  return body;
}

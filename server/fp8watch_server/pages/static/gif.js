// Animated GIF (89a) from frames of one size: only what changes between two frames is written, in at most 255 colours.

const MOST = 255; // colours of a picture; the last index stands for "as before"
const LARGEST_CODE = 4095;

class Bytes {
  constructor() { this.parts = new Uint8Array(1 << 16); this.length = 0; }

  push(...values) {
    if (this.length + values.length > this.parts.length) {
      const larger = new Uint8Array(2 * this.parts.length);
      larger.set(this.parts);
      this.parts = larger;
    }
    for (const v of values) { this.parts[this.length] = v; this.length += 1; }
  }

  text(words) { this.push(...[...words].map((c) => c.charCodeAt(0))); }

  short(n) { this.push(n & 255, n >> 8); }

  done() { return this.parts.slice(0, this.length); }
}

// The colours of some frames, the most frequent first; what is left takes the nearest of them.
export function palette(frames) {
  const count = new Map();
  for (const { data } of frames) {
    const pixels = new Uint32Array(data.buffer, data.byteOffset, data.length / 4);
    for (let k = 0; k < pixels.length;) {
      const p = pixels[k], first = k;
      while (k < pixels.length && pixels[k] === p) k += 1;
      count.set(p, (count.get(p) ?? 0) + k - first);
    }
  }
  const kept = [...count].sort((a, b) => b[1] - a[1]).slice(0, MOST).map(([p]) => p);
  const index = new Map(kept.map((p, i) => [p, i]));
  const part = (p, k) => (p >> (8 * k)) & 255;
  const of = (p) => {
    let i = index.get(p);
    if (i === undefined) {
      let least = Infinity;
      kept.forEach((q, k) => {
        const d = (part(p, 0) - part(q, 0)) ** 2 + (part(p, 1) - part(q, 1)) ** 2 + (part(p, 2) - part(q, 2)) ** 2;
        if (d < least) { least = d; i = k; }
      });
      index.set(p, i);
    }
    return i;
  };
  return { colours: kept.map((p) => [part(p, 0), part(p, 1), part(p, 2)]), of };
}

// LZW with codes of 9 to 12 bits, least significant bit first, in blocks of at most 255 bytes.
function compressed(out, indices) {
  const clear = 256, end = 257;
  let bits = 9, next = end + 1, held = 0, have = 0, block = [], table = new Map();
  const write = (code) => {
    held |= code << have;
    have += bits;
    while (have >= 8) {
      block.push(held & 255);
      held >>>= 8;
      have -= 8;
      if (block.length === 255) { out.push(255, ...block); block = []; }
    }
  };
  out.push(8);
  write(clear);
  let prefix = indices[0];
  for (let k = 1; k < indices.length; k += 1) {
    const key = (prefix << 8) | indices[k], known = table.get(key);
    if (known !== undefined) { prefix = known; continue; }
    write(prefix);
    if (next > LARGEST_CODE) {
      write(clear);
      table = new Map();
      bits = 9;
      next = end + 1;
    } else {
      if (next >= 1 << bits) bits += 1;
      table.set(key, next);
      next += 1;
    }
    prefix = indices[k];
  }
  write(prefix);
  if (next >= 1 << bits && bits < 12) bits += 1;
  write(end);
  if (have) block.push(held & 255);
  if (block.length) out.push(block.length, ...block);
  out.push(0);
}

// The rectangle in which two frames differ, or null.
function changed(before, now, width, height) {
  let [left, top, right, bottom] = [width, height, -1, -1];
  for (let y = 0, k = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1, k += 1) {
      if (before[k] === now[k]) continue;
      if (x < left) left = x;
      if (x > right) right = x;
      if (y < top) top = y;
      bottom = y;
    }
  }
  return right < 0 ? null : [left, top, right - left + 1, bottom - top + 1];
}

// shoot(n): frame n as ImageData, opaque, all of one size; delays_ms: how long each is shown. It begins again at its end.
// Frames are asked for one after the other: all of them at once would be hundreds of megabytes.
export function gif(shoot, delays_ms) {
  const { colours, of } = palette([0, 0.5, 1].map((share) => shoot(Math.round(share * (delays_ms.length - 1)))));
  const { width, height } = shoot(0), out = new Bytes();
  out.text("GIF89a");
  out.short(width);
  out.short(height);
  out.push(0xf7, 0, 0); // 256 colours of 8 bits
  for (let i = 0; i < 256; i += 1) out.push(...(colours[i] ?? [0, 0, 0]));
  out.push(0x21, 0xff, 11);
  out.text("NETSCAPE2.0");
  out.push(3, 1, 0, 0, 0);
  let before = null, raw = null;
  delays_ms.forEach((ms, n) => {
    const frame = shoot(n), pixels = new Uint32Array(frame.data.buffer, frame.data.byteOffset, frame.data.length / 4);
    const now = new Uint8Array(pixels.length);
    for (let k = 0; k < pixels.length; k += 1) now[k] = raw !== null && raw[k] === pixels[k] ? before[k] : of(pixels[k]);
    const [x, y, w, h] = before === null ? [0, 0, width, height] : changed(before, now, width, height) ?? [0, 0, 1, 1];
    out.push(0x21, 0xf9, 4, before === null ? 4 : 5);
    out.short(Math.max(2, Math.round(ms / 10)));
    out.push(MOST, 0, 0x2c);
    for (const v of [x, y, w, h]) out.short(v);
    out.push(0);
    const indices = new Uint8Array(w * h);
    for (let r = 0; r < h; r += 1) {
      for (let c = 0; c < w; c += 1) {
        const k = (y + r) * width + x + c;
        indices[r * w + c] = before !== null && before[k] === now[k] ? MOST : now[k];
      }
    }
    compressed(out, indices);
    before = now;
    raw = pixels;
  });
  out.push(0x3b);
  return out.done();
}

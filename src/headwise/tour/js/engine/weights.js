// The checkpoint's numbers, as they lie in the page (in byte planes) or in a safetensors file that the reader opens.

const WIDTH = { F16: 2, BF16: 2, F32: 4 };
const MAX_HEADER = 1_000_000;

// All 65,536 float16 values, so that unpacking is a look-up.
const HALF = Float32Array.from({ length: 65536 }, (_, h) => {
  const sign = h & 0x8000 ? -1 : 1;
  const [e, f] = [(h >> 10) & 31, h & 1023];
  if (e === 31) return f ? NaN : sign * Infinity;
  return e === 0 ? sign * f * 2 ** -24 : sign * (1 + f / 1024) * 2 ** (e - 15);
});

const sizeOf = (shape) => shape.reduce((a, b) => a * b, 1);

// A tensor's bytes by place: `planes` has all first bytes, then all second bytes, highest first; a file has little-endian
// numbers one after the other.
class Tensor {
  constructor(bytes, { name, dtype, shape, from, planes }) {
    Object.assign(this, { bytes, name, dtype, shape, from, planes, size: sizeOf(shape) });
  }

  // A function that gives the i-th number.
  reader() {
    const { bytes, from, size, dtype } = this;
    const width = WIDTH[dtype];
    const [step, hop] = this.planes ? [1, size] : [width, -1];
    const first = this.planes ? from : from + width - 1;
    if (dtype === "F16") return (i) => HALF[(bytes[first + i * step] << 8) | bytes[first + i * step + hop]];
    const bits = new Uint32Array(1);
    const float = new Float32Array(bits.buffer);
    if (dtype === "BF16") {
      return (i) => {
        bits[0] = ((bytes[first + i * step] << 8) | bytes[first + i * step + hop]) << 16;
        return float[0];
      };
    }
    return (i) => {
      const at = first + i * step;
      bits[0] = (bytes[at] << 24) | (bytes[at + hop] << 16) | (bytes[at + 2 * hop] << 8) | bytes[at + 3 * hop];
      return float[0];
    };
  }

  // All numbers, in order.
  vector() {
    const value = this.reader();
    return this.checked(Float32Array.from({ length: this.size }, (_, i) => value(i)));
  }

  // Turned over (N x K becomes K x N) into a place of the memory; sixteen columns at a time, so that lines are written whole.
  into(memory) {
    const [N, K] = this.shape;
    const place = memory.place(K, N);
    const { from, stride } = place;
    const value = this.reader();
    const { floats } = memory;
    let sum = 0;
    for (let n0 = 0; n0 < N; n0 += 16) {
      const n1 = Math.min(n0 + 16, N);
      for (let k = 0; k < K; k++) for (let n = n0; n < n1; n++) sum += floats[from + k * stride + n] = value(n * K + k);
    }
    if (!Number.isFinite(sum)) throw new Error(`${this.name} holds numbers that are not finite`);
    return place;
  }

  checked(numbers) {
    if (!numbers.every(Number.isFinite)) throw new Error(`${this.name} holds numbers that are not finite`);
    return numbers;
  }
}

// The tensors of the page: [[name, dtype, shape, from]] over the unpacked bytes.
function packedTensors(list, bytes) {
  return new Map(list.map(([name, dtype, shape, from]) => [name, new Tensor(bytes, { name, dtype, shape, from, planes: true })]));
}

// The tensors of a safetensors file. The file is the reader's, so nothing in it is believed before it is checked.
function readSafetensors(bytes) {
  if (bytes.length < 8) throw new Error("model.safetensors is shorter than its header");
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const length = Number(view.getBigUint64(0, true));
  if (length > MAX_HEADER || 8 + length > bytes.length) throw new Error("model.safetensors has a header that does not fit the file");
  const header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(8, 8 + length)));
  const tensors = new Map();
  for (const [name, entry] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const { dtype, shape, data_offsets: offsets } = entry ?? {};
    const whole = (n) => Number.isSafeInteger(n) && n >= 0;
    if (!Array.isArray(shape) || shape.length > 8 || !shape.every(whole)) throw new Error(`${name}: its shape is no list of sizes`);
    if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(whole)) throw new Error(`${name}: it has no place in the file`);
    if (!(dtype in WIDTH)) continue; // refused by name where the model needs it
    const [from, to] = offsets.map((offset) => 8 + length + offset);
    if (to > bytes.length || to - from !== WIDTH[dtype] * sizeOf(shape)) throw new Error(`${name}: its bytes do not fit its shape`);
    tensors.set(name, new Tensor(bytes, { name, dtype, shape, from, planes: false }));
  }
  return tensors;
}

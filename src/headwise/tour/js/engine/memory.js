// One block of numbers that holds the weights and, behind them, scratch space; and the product that works in it. The
// product is 1,082 bytes of WebAssembly, or, where a host forbids that, the loop below. All other code is the same for both.

// make(0), make(1), ... make(count - 1).
const range = (count, make) => Array.from({ length: count }, (_, n) => make(n));

const up = (size, step) => Math.ceil(size / step) * step;

class Memory {
  // `bytes`: the WebAssembly module, or null for the plain loop. `room`: how many numbers are needed in all.
  static async of(bytes, room) {
    const memory = new Memory();
    memory.at = 256; // in numbers; the first kilobyte stays empty
    memory.engine = "js";
    if (bytes) {
      try {
        const { instance } = await WebAssembly.instantiate(bytes);
        instance.exports.memory.grow(Math.ceil((4 * room) / 65536));
        memory.floats = new Float32Array(instance.exports.memory.buffer);
        memory.multiply = (x, T, K, w, N, y) => instance.exports.gemm(4 * x, T, K, 4 * w, N, 4 * y);
        memory.engine = "wasm";
      } catch {
        memory.floats = null; // WebAssembly is off, or has no SIMD
      }
    }
    if (!memory.floats) {
      memory.floats = new Float32Array(room + 16384);
      memory.multiply = (x, T, K, w, N, y) => plainProduct(memory.floats, x, T, K, w, N, y);
    }
    return memory;
  }

  // Room for a matrix of K rows and N columns that stays. Its rows begin a multiple of eight numbers apart.
  place(K, N) {
    const stride = up(N, 8);
    const place = { from: this.at, K, N, stride };
    if (this.at + K * stride > this.floats.length) throw new Error("the engine's memory is full");
    this.at += K * stride;
    return place;
  }

  // y (T x N) = x (T x K) times the matrix at a place.
  linear(x, T, { from, K, N, stride }) {
    const y = this.at + up(T * K, 4);
    this.check(y + T * stride + 8 * K);
    this.floats.set(x, this.at);
    this.multiply(this.at, T, K, from, stride, y);
    if (stride === N) return this.floats.slice(y, y + T * N);
    const out = new Float32Array(T * N);
    for (let t = 0; t < T; t++) out.set(this.floats.subarray(y + t * stride, y + t * stride + N), t * N);
    return out;
  }

  // a (T x K) times b (K x N), both given, N a multiple of eight. The result is a view that the next call overwrites.
  product(a, T, K, b, N) {
    const atB = this.at + up(T * K, 4);
    const y = atB + up(K * N, 4);
    this.check(y + T * N + 8 * K);
    this.floats.set(a, this.at);
    this.floats.set(b, atB);
    this.multiply(this.at, T, K, atB, N, y);
    return this.floats.subarray(y, y + T * N);
  }

  check(end) {
    if (end > this.floats.length) throw new Error(`the engine's memory holds ${this.floats.length} numbers; ${end} are needed`);
  }
}

// Where the plain product copies what it reads: float64, so that the inner loop converts nothing, and in reading order.
const copies = { rows: new Float64Array(0), columns: new Float64Array(0) };

// y (T x N) = x (T x K) w (K x N), all in one array, N a multiple of eight: three rows by four columns at a time, as many
// sums as a processor's registers hold.
function plainProduct(f, x, T, K, w, N, y) {
  const whole = T - (T % 3);
  if (copies.rows.length < whole * K) copies.rows = new Float64Array(whole * K);
  if (copies.columns.length < 4 * K) copies.columns = new Float64Array(4 * K);
  const { rows, columns } = copies;
  for (let t = 0, at = 0; t < whole; t += 3) {
    for (let k = x + t * K; k < x + (t + 1) * K; k++) {
      rows[at++] = f[k]; rows[at++] = f[k + K]; rows[at++] = f[k + 2 * K];
    }
  }
  for (let n = 0; whole && n < N; n += 4) {
    for (let k = 0, at = 0, from = w + n; k < K; k++, from += N) {
      columns[at++] = f[from]; columns[at++] = f[from + 1]; columns[at++] = f[from + 2]; columns[at++] = f[from + 3];
    }
    for (let t = 0; t < whole; t += 3) {
      let a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0, c0 = 0, c1 = 0, c2 = 0, c3 = 0;
      for (let i = t * K, j = 0, end = 4 * K; j < end; i += 3, j += 4) {
        const w0 = columns[j], w1 = columns[j + 1], w2 = columns[j + 2], w3 = columns[j + 3];
        const p = rows[i], q = rows[i + 1], r = rows[i + 2];
        a0 += p * w0; a1 += p * w1; a2 += p * w2; a3 += p * w3;
        b0 += q * w0; b1 += q * w1; b2 += q * w2; b3 += q * w3;
        c0 += r * w0; c1 += r * w1; c2 += r * w2; c3 += r * w3;
      }
      const at = y + t * N + n;
      f[at] = a0; f[at + 1] = a1; f[at + 2] = a2; f[at + 3] = a3;
      f[at + N] = b0; f[at + N + 1] = b1; f[at + N + 2] = b2; f[at + N + 3] = b3;
      f[at + 2 * N] = c0; f[at + 2 * N + 1] = c1; f[at + 2 * N + 2] = c2; f[at + 2 * N + 3] = c3;
    }
  }
  for (let t = whole; t < T; t++) {
    for (let n = 0; n < N; n += 4) {
      let a0 = 0, a1 = 0, a2 = 0, a3 = 0;
      for (let k = 0, at = w + n; k < K; k++, at += N) {
        const p = f[x + t * K + k];
        a0 += p * f[at]; a1 += p * f[at + 1]; a2 += p * f[at + 2]; a3 += p * f[at + 3];
      }
      const at = y + t * N + n;
      f[at] = a0; f[at + 1] = a1; f[at + 2] = a2; f[at + 3] = a3;
    }
  }
}

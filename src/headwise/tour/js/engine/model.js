// A Llama-shaped decoder: norm, attention, norm, SwiGLU; rotary positions; heads that may share keys and values.

class Model {
  // `config` as in config.json, `tensors` by their names in the checkpoint, `wasm` the module's bytes or null.
  static async of(config, tensors, wasm) {
    const model = new Model();
    model.H = config.num_attention_heads;
    model.K = config.num_key_value_heads ?? model.H;
    model.D = config.head_dim ?? config.hidden_size / model.H;
    model.width = config.hidden_size;
    model.L = config.num_hidden_layers;
    model.inner = config.intermediate_size;
    model.vocab = config.vocab_size;
    model.eps = config.rms_norm_eps;
    model.theta = config.rope_parameters?.rope_theta ?? config.rope_theta ?? 10000;
    model.positions = config.max_position_embeddings ?? 2048;
    model.turns = makeTurns(Math.min(model.positions, 512), model.D, model.theta);
    model.memory = await Memory.of(wasm, model.room(config));
    model.load(config, tensors);
    return model;
  }

  // Numbers that the memory must hold: weights, keys and values of fewer heads, scratch for the longest text.
  room(config) {
    const { H, K, D, width, L, inner, vocab } = this;
    const layer = (width + 8) * (3 * H * D + 4 * K * D + 3 * inner + 64);
    const scratch = LONGEST * (2 * Math.max(vocab + 8, inner, width, H * D) + inner + width) + 4 * 512 * (512 + D);
    return L * layer + width * (vocab + 8) * (config.tie_word_embeddings ? 1 : 2) + scratch;
  }

  load(config, tensors) {
    const { H, K, D, width, L, inner, vocab } = this;
    const get = (name, ...shape) => {
      const tensor = tensors.get(name);
      if (!tensor) throw new Error(`the checkpoint has no ${name} in float16, bfloat16 or float32`);
      if (tensor.shape.join() !== shape.join()) throw new Error(`${name} has shape ${tensor.shape.join(" x ")}, not ${shape.join(" x ")}`);
      return tensor;
    };
    const matrix = (name, N, from) => get(name, N, from).into(this.memory);
    this.embed = matrix("model.embed_tokens.weight", vocab, width);
    this.head = config.tie_word_embeddings ? this.embed : matrix("lm_head.weight", vocab, width);
    this.norm = get("model.norm.weight", width).vector();
    this.layers = range(L, (l) => {
      const at = (name, N, from) => matrix(`model.layers.${l}.${name}.weight`, N, from);
      const norm = (name) => get(`model.layers.${l}.${name}.weight`, width).vector();
      return {
        norm1: norm("input_layernorm"), norm2: norm("post_attention_layernorm"),
        q: at("self_attn.q_proj", H * D, width), k: at("self_attn.k_proj", K * D, width), v: at("self_attn.v_proj", K * D, width),
        o: at("self_attn.o_proj", width, H * D),
        gate: at("mlp.gate_proj", inner, width), up: at("mlp.up_proj", inner, width), down: at("mlp.down_proj", width, inner),
      };
    });
    this.shared = new Map([[K, this.layers.map(({ k, v }) => ({ k, v, K }))]]);
  }

  linear(x, T, place) {
    return this.memory.linear(x, T, place);
  }

  // One number of a weight by its row and column in the checkpoint.
  weight({ from, stride }, n, k) {
    return this.memory.floats[from + k * stride + n];
  }

  // Keys and values of `kv` heads a layer: each the plain mean of the neighbouring heads that it stands for.
  keysAndValues(kv) {
    if (!this.shared.has(kv)) {
      const group = this.K / kv;
      const merge = (place) => {
        const merged = this.memory.place(place.K, kv * this.D);
        const { floats } = this.memory;
        for (let k = 0; k < place.K; k++) {
          for (let n = 0; n < kv * this.D; n++) {
            const first = Math.floor(n / this.D) * group * this.D + (n % this.D);
            let sum = 0;
            for (let m = 0; m < group; m++) sum += floats[place.from + k * place.stride + first + m * this.D];
            floats[merged.from + k * merged.stride + n] = sum / group;
          }
        }
        return merged;
      };
      this.shared.set(kv, this.layers.map(({ k, v }) => ({ k: merge(k), v: merge(v), K: kv })));
    }
    return this.shared.get(kv);
  }

  // The numbers of key-value heads that all heads can share evenly: 8, 4, 2, 1.
  sharings() {
    return range(this.K, (i) => this.K - i).filter((kv) => this.K % kv === 0 && this.H % kv === 0);
  }

  embedded(ids) {
    const x = new Float32Array(ids.length * this.width);
    const { from, stride } = this.embed;
    ids.forEach((id, t) => {
      for (let k = 0; k < this.width; k++) x[t * this.width + k] = this.memory.floats[from + k * stride + id];
    });
    return x;
  }

  // Queries, keys and values of a layer, positions turned in.
  project(l, x, T, { rotary = true, kv = this.K } = {}, start = 0) {
    const [{ q: Q }, { k: KEY, v: VALUE, K }] = [this.layers[l], this.keysAndValues(kv)[l]];
    const [q, k, v] = [Q, KEY, VALUE].map((place) => this.linear(x, T, place));
    if (rotary) {
      rotate(q, T, this.H, this.D, this.turns, start);
      rotate(k, T, K, this.D, this.turns, start);
    }
    return { q, k, v, K };
  }

  // What the heads of a layer see, by the names of `headwise.trace`: up to the values that each head mixes, so it is the
  // same whichever heads are off. `options`: causal, rotary, scaled, onePattern, kv; `past`: the cache of this layer.
  see(l, x, T, options = {}, past = null) {
    counts.attentions++;
    const { H, D } = this;
    const start = past ? past.length : 0;
    let { q, k, v, K } = this.project(l, x, T, options, start);
    if (past) {
      past.k.set(k, start * K * D);
      past.v.set(v, start * K * D);
      past.length = start + T;
      [k, v] = [past.k, past.v];
    }
    let weights = this.weigh(q, k, T, start + T, K, { ...options, start });
    if (options.onePattern === true || options.onePattern?.[l]) weights = onePattern(weights, H, T, start + T);
    return { q, k, v, K, weights, mixed: this.mix(weights, v, T, start + T, K) };
  }

  // What a layer's attention adds, from what its heads have seen. `off`: heads that say nothing.
  join(l, seen, T, options = {}, off = null) {
    const { H, D } = this;
    const concat = silenced(seen.mixed, T, H, D, off);
    const joined = options.shuffle ? shuffled(concat, T, H, D, options.shuffle) : concat;
    const o = options.shuffle && options.outputToo ? this.outputShuffled(l, options.shuffle) : this.layers[l].o;
    return { ...seen, concat, output: this.linear(joined, T, o) };
  }

  // The weights of every head: H maps of T queries by S keys.
  weigh(q, k, T, S, K, { causal = true, scaled = true, start = 0 } = {}) {
    const { H, D } = this;
    const weights = new Float32Array(H * T * S);
    const scale = scaled ? 1 / Math.sqrt(D) : 1;
    const wide = up(S, 8);
    const [qh, kt] = [new Float32Array(T * D), new Float32Array(D * wide)];
    for (let h = 0; h < H; h++) {
      const g = Math.floor((h * K) / H);
      for (let i = 0; i < T; i++) for (let d = 0; d < D; d++) qh[i * D + d] = scale * q[(i * H + h) * D + d];
      for (let j = 0; j < S; j++) for (let d = 0; d < D; d++) kt[d * wide + j] = k[(j * K + g) * D + d];
      const s = this.memory.product(qh, T, D, kt, wide);
      for (let i = 0; i < T; i++) softmaxRow(s, i * wide, causal ? start + i + 1 : S, weights, (h * T + i) * S);
    }
    return weights;
  }

  // The values mixed by the weights, heads side by side.
  mix(weights, v, T, S, K) {
    const { H, D } = this;
    const concat = new Float32Array(T * H * D);
    const wide = up(D, 8);
    const vh = new Float32Array(S * wide);
    for (let h = 0; h < H; h++) {
      const g = Math.floor((h * K) / H);
      for (let j = 0; j < S; j++) for (let d = 0; d < D; d++) vh[j * wide + d] = v[(j * K + g) * D + d];
      const out = this.memory.product(weights.subarray(h * T * S, (h + 1) * T * S), T, S, vh, wide);
      for (let i = 0; i < T; i++) for (let d = 0; d < D; d++) concat[(i * H + h) * D + d] = out[i * wide + d];
    }
    return concat;
  }

  // W_O with the columns of each head where `order` has put that head, in a place of its own.
  outputShuffled(l, order) {
    const layer = this.layers[l];
    const { from, stride, N, K } = layer.o;
    layer.moved ??= this.memory.place(K, N);
    const rows = this.D * stride;
    const { floats } = this.memory;
    order.forEach((h, slot) => floats.copyWithin(layer.moved.from + slot * rows, from + h * rows, from + (h + 1) * rows));
    return layer.moved;
  }

  // What the feed-forward part of a layer adds.
  feedForward(l, x, T) {
    const { norm2, gate, up: rise, down } = this.layers[l];
    const n = rmsNorm(x, T, this.width, norm2, this.eps);
    const [g, u] = [this.linear(n, T, gate), this.linear(n, T, rise)];
    for (let i = 0; i < g.length; i++) g[i] = (g[i] / (1 + Math.exp(-g[i]))) * u[i];
    return this.linear(g, T, down);
  }

  // A whole layer, x in place; gives what attention showed. `seen`: what its heads have seen, where that is known.
  layer(l, x, T, options, off, past, seen = null) {
    counts.layers++;
    const shown = this.join(l, seen ?? this.see(l, rmsNorm(x, T, this.width, this.layers[l].norm1, this.eps), T, options, past), T, options, off);
    for (let i = 0; i < x.length; i++) x[i] += shown.output[i];
    const more = this.feedForward(l, x, T);
    for (let i = 0; i < x.length; i++) x[i] += more[i];
    return shown;
  }

  logits(x, T) {
    return this.linear(rmsNorm(x, T, this.width, this.norm, this.eps), T, this.head);
  }

  // Logits of all tokens, with a pause after each layer, where it gives what attention showed and the residual. `resume`:
  // { layer, x, seen }, a kept residual to go on from, and what the heads of that layer have seen.
  *pass(ids, options = {}, { off = [], cache = null, resume = null } = {}) {
    counts.forwards++;
    const first = resume?.layer ?? 0;
    const x = resume ? resume.x.slice() : this.embedded(ids);
    for (let l = first; l < this.L; l++) {
      yield { x, seen: this.layer(l, x, ids.length, options, off[l], cache?.[l], l === first ? resume?.seen : null) };
    }
    return this.logits(x, ids.length);
  }

  // The same in one go.
  forward(...asked) {
    const pass = this.pass(...asked);
    for (;;) {
      const { done, value } = pass.next();
      if (done) return value;
    }
  }

  newCache(size, kv = this.K) {
    return this.layers.map(() => ({ k: new Float32Array(size * kv * this.D), v: new Float32Array(size * kv * this.D), length: 0 }));
  }
}

// Every head gets the mean of all heads' weights: what a layer can do with one pattern.
function onePattern(weights, H, T, S) {
  const out = new Float32Array(weights.length);
  for (let i = 0; i < T * S; i++) {
    let sum = 0;
    for (let h = 0; h < H; h++) sum += weights[h * T * S + i];
    for (let h = 0; h < H; h++) out[h * T * S + i] = sum / H;
  }
  return out;
}

// The concatenation where some heads are off: their columns are 0.
function silenced(mixed, T, H, D, off) {
  if (!off?.some(Boolean)) return mixed;
  const out = mixed.slice();
  for (let t = 0; t < T; t++) for (let h = 0; h < H; h++) if (off[h]) out.fill(0, (t * H + h) * D, (t * H + h + 1) * D);
  return out;
}

// The slices of the concatenation in another order: slot s gets head order[s].
function shuffled(concat, T, H, D, order) {
  const out = new Float32Array(concat.length);
  for (let t = 0; t < T; t++) order.forEach((h, slot) => out.set(concat.subarray((t * H + h) * D, (t * H + h + 1) * D), (t * H + slot) * D));
  return out;
}

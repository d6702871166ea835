// Another model: three files of the reader's, which stay on the reader's machine.

const MOST = 60_000_000; // parameters

function checkConfig(config) {
  const whole = (name) => {
    if (!Number.isInteger(config[name]) || config[name] < 1 || config[name] > 10_000_000) throw new Error(`config.json: ${name} is no size`);
  };
  if (config === null || typeof config !== "object" || Array.isArray(config)) throw new Error("config.json holds no object");
  ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"].forEach(whole);
  const { architectures: [name] = [], hidden_size: width, num_attention_heads: H } = config;
  const rope = config.rope_parameters ?? config.rope_scaling ?? {};
  if (!chapter.accepted.includes(name)) throw new Error(`this page runs ${chapter.accepted.join(" and ")}, not ${name}; headwise look opens it`);
  if ((config.hidden_act ?? "silu") !== "silu" || config.attention_bias || config.mlp_bias || config.sliding_window) throw new Error("this page runs SiLU without biases and windows; headwise look opens other models");
  if ((rope.rope_type ?? rope.type ?? "default") !== "default") throw new Error("this page runs default rotary positions; headwise look opens other models");
  const D = config.head_dim ?? width / H;
  const K = config.num_key_value_heads ?? H;
  if (!Number.isInteger(D) || D < 2 || D % 2 || D > 512 || !Number.isInteger(K) || K < 1 || H % K) throw new Error("config.json: heads and widths do not fit each other");
  if (config.num_hidden_layers > 64 || H > 128) throw new Error("the model has more layers or heads than this page draws");
  const layer = width * (2 * H * D + 2 * K * D + 3 * config.intermediate_size);
  const size = config.num_hidden_layers * layer + config.vocab_size * width * (config.tie_word_embeddings ? 1 : 2);
  if (size > MOST) throw new Error(`the model has ${thousands(size)} parameters; this page runs ${thousands(MOST)} at most`);
}

async function openFiles(files) {
  const named = new Map([...files].map((file) => [file.name, file]));
  const need = ["config.json", "tokenizer.json", "model.safetensors"];
  const missing = need.filter((name) => !named.has(name));
  if (missing.length) throw new Error(`choose all three files together; missing: ${missing.join(", ")}`);
  if (named.get("model.safetensors").size > 4 * MOST + 1_000_000) throw new Error(`model.safetensors is too large for this page: ${thousands(MOST)} parameters at most`);
  if (named.get("config.json").size > 1_000_000 || named.get("tokenizer.json").size > 50_000_000) throw new Error("config.json or tokenizer.json is too large to be one");
  const json = async (name) => {
    try {
      return JSON.parse(await named.get(name).text());
    } catch {
      throw new Error(`${name} is no JSON`);
    }
  };
  const config = await json("config.json");
  checkConfig(config);
  const [tokenizer, tokenizerConfig] = [await json("tokenizer.json"), named.has("tokenizer_config.json") ? await json("tokenizer_config.json") : {}];
  const bytes = new Uint8Array(await named.get("model.safetensors").arrayBuffer());
  const opened = await Model.of(config, readSafetensors(bytes), wasmBytes());
  const read = new Words(tokenizer, tokenizerConfig);
  const most = Math.max(...read.ids("The first words"));
  if (!(most < opened.vocab)) throw new Error("tokenizer.json has more tokens than the model");
  chapter.config = config;
  chapter.packaged = false;
  chapter.name = "your files";
  chapter.formation = [];
  start(opened, read);
}

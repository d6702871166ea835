// Text to tokens and back: the library's tokenizer, and the bytes that a token stands for.

const LONGEST = 160; // tokens that the page runs; a map of 160 x 160 is still seen

// The library's byte-level pattern says \s, which in JavaScript has U+FEFF and lacks U+0085; the tokenizers that were
// trained with it mean Unicode's white space.
function unicodeSpaces(part) {
  if (part?.pattern instanceof RegExp) {
    const source = part.pattern.source.replaceAll("(?!\\S)", "(?!\\P{White_Space})").replaceAll("\\s", "\\p{White_Space}");
    part.pattern = new RegExp(source, part.pattern.flags);
  }
  for (const inner of part?.tokenizers ?? []) unicodeSpaces(inner);
}

class Words {
  constructor(json, config) {
    this.tokenizer = new tokenizers.Tokenizer(json, config);
    unicodeSpaces(this.tokenizer.pre_tokenizer);
    this.special = new Map((json.added_tokens ?? []).map((token) => [token.id, token.content]));
    this.byteLevel = JSON.stringify([json.pre_tokenizer, json.decoder]).includes('"ByteLevel"');
    this.bytesOf = new Map();
    for (let b = 0, extra = 0; b < 256; b++) {
      const plain = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
      this.bytesOf.set(String.fromCharCode(plain ? b : 256 + extra++), b);
    }
  }

  // The ids of a text, its opening token included.
  ids(text) {
    return this.tokenizer.encode(text).ids.map(Number);
  }

  // What a token says: its text, and the bytes in hex where they are no whole characters.
  piece(id) {
    if (this.special.has(id)) return { text: this.special.get(id), hex: null };
    const name = String(this.tokenizer.id_to_token(id) ?? "");
    if (!this.byteLevel) return { text: name.replaceAll("\u2581", " "), hex: null };
    const bytes = Uint8Array.from([...name].flatMap((c) => (this.bytesOf.has(c) ? [this.bytesOf.get(c)] : [...new TextEncoder().encode(c)])));
    try {
      return { text: new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes), hex: null };
    } catch {
      const hex = [...bytes].map((b) => b.toString(16).toUpperCase().padStart(2, "0")).join(" ");
      return { text: `<${hex}>`, hex };
    }
  }
}

"""What the heads of the packaged model do on a text: the best head of each role, and the whole table."""

import headwise.hf
from headwise import look, models

tiny = headwise.hf.load(models.tiny_path())
ids, tokens = tiny.encode(models.default_text())
seen = look.at(tiny.model, ids, tokens=tokens, delimiters=tiny.delimiters, name="tiny")

for role in ("previous-token", "induction", "duplicate-token", "first-token sink"):
    for head in seen.with_role(role)[:1]:
        score = head.score(role)
        print(f"{role}: layer {head.layer} head {head.head}, {score.value:.2f} (threshold {score.threshold})")
print()
print(seen)

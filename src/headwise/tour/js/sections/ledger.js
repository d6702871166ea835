// 14. All statements, their verdicts, and the numbers that the reader got.

on("measured", (id) => {
  const row = document.querySelector(`#ledger-rows [data-id="${id}"]`);
  if (!row) return;
  row.querySelector(".yours").textContent = measured.get(id).text;
  row.classList.add("tried");
  const count = document.querySelectorAll("#ledger-rows .tried").length;
  say("ledger-said", `${count} of ${measures.size} numbers have been computed in this page on the text above${count < measures.size ? "; the others are computed when their section comes into view" : ""}.`);
});

section("ledger", {
  build() {
    byId("ledger-show").onchange = (event) => {
      for (const row of document.querySelectorAll("#ledger-rows tr")) row.hidden = Boolean(event.target.value) && row.dataset.verdict !== event.target.value;
    };
    byId("ledger-copy").onclick = async () => {
      const text = ledgerText();
      try {
        await navigator.clipboard.writeText(text);
        say("ledger-copied", "Copied.");
      } catch {
        const box = byId("ledger-text");
        box.value = text;
        box.hidden = false;
        box.select();
        say("ledger-copied", "This browser does not let a file write to the clipboard: copy the text below.");
      }
    };
    byId("ledger-all").onclick = () => drawAll?.();
  },
});

function ledgerText() {
  const cell = (text) => text.replaceAll("|", "\\|").replaceAll("\n", " ");
  const rows = chapter.claims.map(({ id, statement, verdict, output }) => `| ${cell(statement)} | ${verdict} | ${cell(measured.get(id)?.text ?? output ?? "")} |`);
  return ["| statement | verdict | number |", "|---|---|---|", ...rows].join("\n");
}

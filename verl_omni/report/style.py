"""The look of the report: one style sheet, light or dark as the reader's system is."""

STYLE = """
:root {
  color-scheme: light dark;
  --bg: #f6f7f9; --panel: #fff; --ink: #1c2530; --soft: #5b6877; --line: #dfe4ea;
  --up: #12805c; --down: #b3423a;
  --c0: #2f6fde; --c1: #e07a1f; --c2: #17936b; --c3: #a14fc4;
  --c4: #d0457a; --c5: #8a8f98; --c6: #b59a12; --c7: #1aa0b8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #12161c; --panel: #1b212a; --ink: #e4e9ef; --soft: #97a4b3; --line: #303945;
    --up: #4cc79a; --down: #ef8077;
    --c0: #6ea2ff; --c1: #f2a154; --c2: #4cc79a; --c3: #c98be6;
    --c4: #f07aa6; --c5: #9aa1ac; --c6: #d9c24a; --c7: #55c8dc;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { margin: 0; font-size: 28px; line-height: 1.2; }
h2 { margin: 36px 0 12px; font-size: 19px; }
.facts, .note, .absent { color: var(--soft); margin: 4px 0 16px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 14px; }
.card, figure, .pair, details, .command {
  background: var(--panel); border: 1px solid var(--line); border-radius: 10px;
}
.card { padding: 14px 16px; }
.label { color: var(--soft); font-size: 13px; }
.value { font-size: 25px; font-weight: 650; font-variant-numeric: tabular-nums; }
.arrow { color: var(--soft); font-weight: 400; }
.up { color: var(--up); } .down { color: var(--down); } .flat { color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
figure { margin: 0; padding: 12px 14px; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figcaption { font-weight: 600; margin-bottom: 4px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg .grid { stroke: var(--line); stroke-width: 1; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; color: var(--soft); font-size: 13px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); gap: 14px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 8px 10px; padding: 10px 12px 12px; }
.prompt { grid-column: 1 / -1; font-size: 13px; overflow-wrap: anywhere; }
.shot { display: flex; flex-direction: column; font-size: 12px; color: var(--soft); min-width: 0; }
.shot b { color: var(--ink); overflow-wrap: anywhere; }
.shot img { width: 100%; border-radius: 6px; image-rendering: pixelated; margin-bottom: 4px; }
.score {
  padding: 1px 6px; border-radius: 5px; color: #fff; font-weight: 600; font-style: normal;
  background: color-mix(in srgb, #12805c calc(var(--good) * 100%), #b3423a);
}
pre { margin: 0; padding: 12px 16px; overflow: auto; font: 13px/1.5 ui-monospace, monospace; }
.command { user-select: all; white-space: pre-wrap; }
.about { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0 0 14px; }
.about dt { color: var(--soft); } .about dd { margin: 0; overflow-wrap: anywhere; }
details { padding: 10px 16px; margin-top: 36px; }
summary { font-weight: 600; cursor: pointer; }
details pre { padding: 12px 0 0; }
@media (max-width: 720px) { .charts { grid-template-columns: minmax(0, 1fr); } }
"""

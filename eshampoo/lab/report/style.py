"""The style sheet of the report; a module, so that it is installed with the code."""

STYLE = """
:root { color-scheme: light; --ink: #1c2430; --soft: #5a6675; --line: #dfe4ea; --paper: #fff;
  --ground: #f5f7f9; --accent: #0b5c8f; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: clamp(1.5rem, 4vw, 2.1rem); line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.1rem; margin: 0 0 .8rem; }
.eyebrow { margin: 0 0 .3rem; color: var(--accent); font-weight: 600; font-size: .85rem; }
.verdict { font-size: clamp(1.05rem, 2.6vw, 1.25rem); margin: 0 0 1.6rem; max-width: 46em;
  padding-left: .9rem; border-left: 4px solid var(--accent); }
.note { color: var(--soft); font-size: .85rem; margin: .8rem 0 0; max-width: 60em; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
  padding: 20px; margin: 0 0 20px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .5rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: baseline; }
th:first-child { text-align: left; }
thead th { color: var(--soft); font-size: .82rem; font-weight: 600; }
tbody tr:last-child > * { border-bottom: 0; }
tbody tr:first-child th { color: var(--accent); }
table.plain td { text-align: left; font-size: .88rem; overflow-wrap: anywhere; }
table.plain th, table.plain tr:first-child th { color: inherit; font-size: .88rem; }
.charts { display: grid; gap: 24px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.charts.three { grid-template-columns: repeat(3, minmax(0, 1fr)); }
.chart { margin: 0; display: flex; flex-direction: column; }
.chart > img { width: 100%; height: auto; margin-top: auto; }
figcaption { font-weight: 600; font-size: .95rem; }
pre { background: var(--ground); border-radius: 8px; padding: .8rem 1rem; margin: 0 0 1rem;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: .6rem 1.2rem;
  margin: 1rem 0 0; font-size: .88rem; }
dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 900px) { .charts.three { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
@media (max-width: 640px) {
  main { padding: 20px 12px 40px; }
  section { padding: 14px; }
  .charts, .charts.three { grid-template-columns: minmax(0, 1fr); }
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  table, tbody, tr, th, td { display: block; width: 100%; }
  tbody tr { padding: .5rem 0; border-bottom: 1px solid var(--line); }
  tbody tr:last-child { border-bottom: 0; }
  tbody th, tbody td { border: 0; padding: .1rem 0; text-align: left; }
  td[data-label] { display: flex; justify-content: space-between; gap: 1rem; }
  td[data-label]::before { content: attr(data-label); color: var(--soft); }
}
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""

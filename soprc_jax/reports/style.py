"""The style sheet of a report: no fonts or pictures of its own, light and dark, from a phone to a wide screen."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --card: #f5f6f8; --text: #1b1f24; --soft: #57606a; --edge: #d0d7de; --grid: #e3e7ec; --link: #0b5cad;
  --c0: #0b62b0; --c1: #c2500a; --c2: #0a7d5a; --c3: #94388a; --c4: #8a6400; --c5: #2f8fb8;
  --right: #0a7d5a; --wrong: #c2302b; --changed: #fff3cf;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1318; --card: #191f27; --text: #e8ecf1; --soft: #a3aebb; --edge: #3a4450; --grid: #29323c; --link: #79b8ff;
    --c0: #6cb6ff; --c1: #ff9d5c; --c2: #4fd3a5; --c3: #e59be0; --c4: #e6c34a; --c5: #a5dcf5;
    --right: #4fd3a5; --wrong: #ff8078; --changed: #3d3410;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 1120px; padding: 16px; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 8px 0; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 40px 0 8px; padding-top: 12px; border-top: 1px solid var(--edge); }
h3 { font-size: 1.05rem; margin: 24px 0 8px; }
p { margin: 8px 0; max-width: 80ch; }
a { color: var(--link); }
code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 0.9em; overflow-wrap: anywhere; }
.note { color: var(--soft); }
.warning { border-left: 4px solid var(--wrong); padding: 6px 12px; background: var(--card); }
.name { overflow-wrap: anywhere; unicode-bidi: isolate; }
nav ul { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; margin: 12px 0; padding: 0; }
nav a { display: inline-block; padding: 4px 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 16px 0; padding: 0; }
.cards div { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 10px 12px; }
.cards dt { color: var(--soft); font-size: 0.85rem; }
.cards dd { margin: 0; font-size: 1.4rem; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.table { margin: 16px 0; }
.table figcaption { color: var(--soft); font-size: 0.9rem; margin-bottom: 6px; }
.scroll { overflow-x: auto; width: fit-content; max-width: 100%; border: 1px solid var(--edge); border-radius: 8px; }
.scroll:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 12px; text-align: left; border-top: 1px solid var(--edge); vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; }
thead th { border-top: 0; }
tbody th { font-weight: 600; }
th .name, td .name { display: inline-block; max-width: 34ch; overflow-wrap: break-word; }
th code { overflow-wrap: normal; white-space: nowrap; }
thead th { background: var(--card); vertical-align: bottom; }
thead th.number { white-space: normal; }
tr.own th, tr.own td { background: var(--changed); }
.side { display: flex; flex-wrap: wrap; gap: 0 32px; }
.side > figure { max-width: 100%; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 364px), 1fr)); gap: 16px; margin: 12px 0; }
figure { margin: 0; min-width: 0; }
.chart { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 10px; }
.chart figcaption { font-weight: 600; font-size: 0.95rem; margin-bottom: 6px; overflow-wrap: anywhere; }
.chart svg { display: block; width: 100%; height: auto; }
.chart text { fill: var(--text); font: 12.5px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
.chart p { margin: 6px 0 0; font-size: 0.85rem; }
.chart text.label { fill: var(--soft); }
.grid { stroke: var(--grid); stroke-width: 1; }
.axis { stroke: var(--soft); stroke-width: 1; }
.mark { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 4; }
.bar { fill: var(--c0); }
.curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.curve.main { stroke: var(--text); stroke-width: 2.6; }
.curve.faint { stroke-width: 1; opacity: 0.45; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); }
.c3 { stroke: var(--c3); } .c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); }
.d1 { stroke-dasharray: 6 4; } .d2 { stroke-dasharray: 1 4; }
circle.curve { stroke-dasharray: none; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 8px 0 0; padding: 0; font-size: 0.85rem; }
.legend li { display: flex; align-items: center; gap: 6px; min-width: 0; }
.chart .legend svg.sample { width: 26px; height: 12px; flex: none; }
.query { border: 1px solid var(--edge); border-radius: 8px; padding: 10px; margin: 12px 0; background: var(--card); }
.query > p { margin: 0 0 8px; max-width: none; font-size: 0.9rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(84px, 1fr)); gap: 8px; list-style: none; margin: 0; padding: 0; }
.tile { min-width: 0; font-size: 0.75rem; line-height: 1.3; }
.tile .picture { position: relative; display: block; width: 100%; max-width: 96px; aspect-ratio: 1; background: #8080801f; border: 3px solid var(--soft);
  border-radius: 4px; overflow: hidden; }
.tile img { display: block; width: 100%; height: 100%; object-fit: contain; }
.tile.is-right .picture { border: 3px solid var(--right); }
.tile.is-wrong .picture { border: 4px dashed var(--wrong); }
.tile.is-query .picture { border: 4px double var(--text); }
.tile b { display: block; font-weight: 600; margin-top: 3px; }
.tile.is-right b { color: var(--right); } .tile.is-wrong b { color: var(--wrong); }
.tile span { display: block; overflow-wrap: anywhere; }
.pairs { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 12px; }
.pairs .query { margin: 0; min-width: 0; }
.strip { display: flex; flex-wrap: wrap; gap: 4px; }
.strip img { width: 48px; height: 48px; object-fit: contain; background: #8080801f; border: 1px solid var(--edge); border-radius: 3px; display: block; }
td .strip { min-width: 156px; }
details { margin: 12px 0; } summary { cursor: pointer; padding: 6px 0; color: var(--link); }
footer { margin-top: 40px; padding-top: 12px; border-top: 1px solid var(--edge); color: var(--soft); font-size: 0.85rem; }
@media (max-width: 480px) { .tiles { grid-template-columns: repeat(auto-fill, minmax(72px, 1fr)); } body { padding: 12px; } table { font-size: 0.72rem; } th, td { padding: 6px 3px; } tr > :first-child { padding-left: 6px; } tr > :last-child { padding-right: 6px; } th .name, td .name { max-width: 18ch; }
  .tile b { font-size: 0.7rem; }
  td .strip { min-width: 122px; } td .strip img { width: 38px; height: 38px; } }
@media (min-width: 800px) { .chart text { font-size: 10.5px; } }
@media print { .query, .chart { break-inside: avoid; } }
"""

// Makes dist/ of src/ and static/: what hob has in its binary. `node build.mjs --out DIR` writes elsewhere.
// The same sources give the same bytes: nothing depends on the time or on where this lies.

import { copyFileSync, mkdirSync, readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';

const here = dirname(fileURLToPath(import.meta.url));
const at = process.argv.indexOf('--out');
const out = at > 0 ? process.argv[at + 1] : join(here, 'dist');
const ours = '/* The dashboard of hob; written by dashboard/build.mjs, do not edit. */';
// Who passes the file on passes on what its licence wants to be passed on.
const uplot = JSON.parse(readFileSync(join(here, 'node_modules/uplot/package.json'), 'utf8'));
const licence = readFileSync(join(here, 'node_modules/uplot/LICENSE'), 'utf8').trim();
const theirs = `/*! It holds uPlot ${uplot.version}, https://github.com/leeoniya/uPlot\n\n${licence}\n*/`;
const banner = `${ours}\n${theirs}`;

mkdirSync(out, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { app: 'src/main.ts' },
  outdir: out,
  bundle: true,
  minify: true,
  charset: 'utf8',
  format: 'esm',
  target: ['es2022', 'chrome123', 'firefox128', 'safari17.5'],
  banner: { js: banner, css: banner },
  logLevel: 'warning',
});
for (const file of ['index.html', 'icon.svg']) {
  copyFileSync(join(here, 'static', file), join(out, file));
}

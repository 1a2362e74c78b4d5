// Makes dist/ of src/ and static/: what hob has in its binary. `node build.mjs --out DIR` writes elsewhere.
// The same sources give the same bytes: nothing depends on the time or on where this lies.

import { copyFileSync, mkdirSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';

const here = dirname(fileURLToPath(import.meta.url));
const at = process.argv.indexOf('--out');
const out = at > 0 ? process.argv[at + 1] : join(here, 'dist');
const ours = `/* The dashboard of hob; written by dashboard/build.mjs, do not edit. Notes about the chart library are in THIRD-PARTY.md. */`;

mkdirSync(out, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { app: 'src/main.ts' },
  outdir: out,
  bundle: true,
  minify: true,
  // Banners of licences stay where they are.
  legalComments: 'inline',
  charset: 'utf8',
  format: 'esm',
  target: ['es2022', 'chrome123', 'firefox128', 'safari17.5'],
  banner: { js: ours, css: ours },
  logLevel: 'warning',
});
for (const file of ['index.html', 'icon.svg']) {
  copyFileSync(join(here, 'static', file), join(out, file));
}

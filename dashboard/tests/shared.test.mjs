// Shared caches: the page shows how hob divides their pool, and a size that is left empty makes a cache shared.

import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { Stage, clean, source, until } from './stage.mjs';

const MIB = 1 << 20;
const { bytes } = await source('format');

let stage;
let page;

before(async () => {
  stage = new Stage();
  const backings = { web: 192, db: 192, files: 64 };
  for (const name in backings) backings[name] = await stage.array(name, backings[name], 4, 4);
  const pool = (name, mebibytes) => `[[pool]]\nname = "${name}"\nsegment_size = "1M"\nsize = "${mebibytes}M"\ndevices = ["${stage.path(name)}"]\n`;
  const disk = (name, cache) => `[[disk]]\nname = "${name}"\nbacking = "${backings[name]}"\n${cache}\n`;
  const shared = 'cache = { pool = "flash", block_size = "16K", admission = "always" }';
  stage.configure(pool('flash', 64) + pool('other', 16) + disk('web', shared) + disk('db', shared) + disk('files', ''));
  await stage.daemon();
  const guest = (disk, mebibytes, iops) =>
    stage.fio(disk, ['--rw=randread', '--bs=16k', '--iodepth=8', `--rate_iops=${iops}`, `--size=${mebibytes * MIB}`]);
  guest('web', 44, 600);
  guest('db', 180, 200);
  page = await stage.open((await stage.dashboard()).url);
});

after(() => stage?.end());

const shared = () => stage.api('/v1/pools/flash').shared;
const part = () => page.locator('[data-pool=flash] .shared');
const cache = (disk) => stage.api(`/v1/disks/${disk}`).cache;

test('the table has the figures of the API', async () => {
  await until(() => shared().caches.find(({ disk }) => disk === 'web').size > 36 * MIB, 'web gets most of the pool', 60_000);
  const row = async (disk) => (await part().locator(`tr[data-disk=${disk}] td`).allInnerTexts()).map((text) => text.trim());
  await until(async () => {
    for (const { disk, size, target } of shared().caches) assert.deepEqual((await row(disk)).slice(0, 2), [bytes(size), bytes(target)]);
    return true;
  }, 'sizes and targets');
  await until(async () => {
    const [, , reads, hits, more, gained] = await row('web');
    assert.ok(Number(reads) > 100 && parseFloat(hits) > 50, `${reads} reads a second, ${hits} hits`);
    assert.match(more, /^(\+\d+|0)$/);
    assert.match(gained, /^\+\d+$/, 'more hits than with half of the pool');
    return true;
  }, 'reads and hits');
  assert.match(await part().locator('.facts').innerText(), /^hob divides \d+\sMiB among 2 caches · \d+\s[MK]?i?B moved between caches/);
  assert.ok(await page.locator('[data-pool=other] .shared').isHidden(), 'a pool without shared caches');
});

test('the chart has a layer for each disk', async () => {
  const labels = async () => (await part().locator('.legend li:visible').allInnerTexts()).map((text) => text.replace(/\s+/g, ' ').trim());
  const [db, web] = await until(async () => {
    const found = await labels();
    return /^db \d+ MiB$/.test(found[0]) && /^web \d+ MiB$/.test(found[1]) && found;
  }, 'the legend');
  assert.ok(parseInt(web.slice(4)) > parseInt(db.slice(3)), `${web}, ${db}`);
  const colors = () => part().locator('.chart').evaluate((chart) => {
    const canvas = chart.querySelector('canvas');
    // Reading the chart's own canvas often makes the browser complain.
    const copy = Object.assign(document.createElement('canvas'), { width: canvas.width, height: canvas.height }).getContext('2d', { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    const all = new Map();
    for (let at = 0; at < data.length; at += 4) {
      const color = `rgb(${data[at]}, ${data[at + 1]}, ${data[at + 2]})`;
      all.set(color, (all.get(color) ?? 0) + 1);
    }
    return [...chart.querySelectorAll('.legend li:not([hidden]) .swatch')].slice(0, 2).map((swatch) => all.get(getComputedStyle(swatch).backgroundColor) ?? 0);
  });
  await until(async () => (await colors()).every((pixels) => pixels > 200), 'both colours in the chart');
});

test('a disk says its size and its target', async () => {
  await page.locator('#disks tr[data-disk=web] button').click();
  await until(async () => /cache of \d+\sMiB \(shared, target \d+\sMiB\) in flash/.test(await page.locator('#detail').innerText()), 'the size');
  assert.match(await page.locator('#disks tr[data-disk=web] .state').innerText(), /^write-through, \d+\sMiB shared$/);
  assert.equal(await page.inputValue('#cache-size'), '', 'no size of its own');
  assert.match(await page.locator('#cache-size-hint').innerText(), /^such as 8G, or empty: hob chooses the size/);
});

test('an empty size makes a cache shared', async () => {
  const dialog = page.locator('dialog');
  const confirm = async (says, verb) => {
    await page.locator('#cache button[type=submit]').click();
    assert.match(await dialog.innerText(), says);
    await dialog.getByRole('button', { name: verb, exact: true }).click();
    await until(async () => {
      const close = dialog.getByRole('button', { name: 'Close', exact: true });
      if (await close.isVisible()) await close.click();
      return (await dialog.count()) === 0;
    }, 'the dialog ends');
  };
  await page.locator('#disks tr[data-disk=files] button').click();
  await confirm(/Create a shared cache for files[^]*Size\s*–\s*→\s*shared[^]*hob chooses the size/, 'Enable it');
  assert.equal(cache('files').shared.disk, 'files');
  await until(async () => (await part().locator('tbody tr').count()) === 3, 'the table has it');
  await page.fill('#cache-size', '8M');
  await confirm(/Size\s*shared\s*→\s*8M[^]*hob no longer changes the size/, 'Change it');
  assert.deepEqual([cache('files').size, cache('files').shared], [8 * MIB, undefined]);
  await until(async () => (await part().locator('tbody tr').count()) === 2, 'the table no longer has it');
  await page.fill('#cache-size', '');
  await confirm(/Size\s*8M\s*→\s*shared[^]*hob chooses the size/, 'Change it');
  assert.equal(cache('files').shared.disk, 'files');
});

test('nothing went wrong on the page, and nothing left it', () => clean(page));

// Two hosts and a real etcd: what the page shows of the cluster, and a move that is ordered on it.

import assert from 'node:assert/strict';
import { mkdirSync, statSync } from 'node:fs';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { Stage, clean, freePort, pictures, sleep, source, until } from './stage.mjs';

const MIB = 1 << 20;

let a;
let b;
let url;

/** A host that is told of disks on arrays of the first one. */
async function host(stage, name, etcd, poolMib, disks) {
  const disk = ([disk, backing, size]) => `[[disk]]\nname = "${disk}"\nbacking = "${backing}"\ncache = { pool = "flash", size = "${size}", block_size = "4K" }\n`;
  stage.configure(
    `[cluster]\netcd = ["${etcd}"]\nhost = "${name}"\naddress = "10.0.0.${name === 'node-a' ? 1 : 2}:9443"\nlease_seconds = 10\nsettle_seconds = 1\n` +
      `[[pool]]\nname = "flash"\nsegment_size = "1M"\nsize = "${poolMib}M"\ndevices = ["${stage.path('nvme0')}"]\n` + disks.map(disk).join(''),
  );
  await stage.daemon();
}

before(async () => {
  mkdirSync(pictures, { recursive: true });
  [a, b] = [new Stage(), new Stage()];
  const [client, peer] = [await freePort(), await freePort()];
  const at = (port) => `http://127.0.0.1:${port}`;
  a.start('etcd', ['--name', 'm0', '--data-dir', a.path('etcd'), '--listen-client-urls', at(client), '--advertise-client-urls', at(client),
    '--listen-peer-urls', at(peer), '--initial-advertise-peer-urls', at(peer), '--initial-cluster', `m0=${at(peer)}`, '--logger', 'zap', '--log-level', 'error']);
  const [busy, calm, idle] = [await a.array('busy', 64, 2, 2), await a.array('calm', 64, 2, 2), await a.array('idle', 64, 2, 2)];
  await host(a, 'node-a', at(client), 14, [['busy', busy, '2M'], ['calm', calm, '8M']]);
  await host(b, 'node-b', at(client), 96, [['idle', idle, '8M']]);
  a.fio('busy', ['--rw=randread', '--bs=16k', '--iodepth=2', '--rate_iops=300', `--size=${24 * MIB}`]);
  a.fio('calm', ['--rw=randread', '--bs=4k', '--iodepth=1', '--rate_iops=100', `--size=${6 * MIB}`]);
  ({ url } = await a.dashboard());
});

after(async () => {
  await b?.end();
  await a?.end();
});

test('hosts, disks and what had better move are shown, and a move can be ordered', async () => {
  const page = await a.open(url, { colorScheme: 'light', viewport: { width: 1360, height: 760 } });
  const text = (selector) => page.locator(selector).innerText();
  await until(async () => /node-a is a member/.test(await text('#cluster > .facts')), 'the lease');
  await until(async () => (await page.locator('#cluster-hosts tbody tr').count()) === 2, 'both hosts');
  assert.match(await text('#cluster-hosts tr[data-host=node-b]'), /10\.0\.0\.2:9443/);
  await until(async () => /node-b/.test(await text('#cluster-disks tr[data-disk=idle]')), 'whose the disk is');
  assert.match(await text('#cluster-disks tr[data-disk=busy]'), /held\s+node-a/);
  assert.match(await text('#cluster-moves'), /No disk is being moved/);
  await until(async () => (await page.locator('#cluster-advice tr[data-disk=busy] button').count()) === 1, 'the advice', 90_000);
  assert.match(await text('#cluster-advice tr[data-disk=busy]'), /node-a\s+node-b/);
  assert.match(await text('#advice-sum'), /^Of [\d\u202f]+ reads\/s flash serves .* after these moves/);
  await page.locator('#cluster').scrollIntoViewIfNeeded();
  await page.evaluate(() => document.querySelector('#cluster').scrollIntoView());
  await sleep(1000);
  const path = join(pictures, 'dashboard-cluster.png');
  await page.screenshot({ path });
  assert.ok(statSync(path).size > 5000);
  // Somebody uses it: it would migrate, for which these hosts have no certificates. The page says why not.
  const order = async () => {
    await page.locator('#cluster-advice tr[data-disk=busy] button').click();
    assert.match(await text('dialog'), /Move busy to node-b/);
    await page.locator('dialog').getByRole('button', { name: 'Move it' }).click();
    await page.locator('dialog').waitFor({ state: 'detached' });
  };
  await order();
  await until(async () => /busy was not moved to node-b: .*certificate/.test(await text('#cluster-moves')), 'why it did not', 30_000);
  // Now nobody does.
  a.children.find((child) => child.spawnargs.includes('--name=busy')).kill('SIGTERM');
  await until(() => a.api('/v1/cluster/advice').disks.some((disk) => disk.name === 'busy' && disk.users === 0), 'the guest to be gone', 30_000);
  if ((await page.locator('#cluster-advice tr[data-disk=busy] button').count()) === 1) await order();
  else a.ctl(['cluster', 'move', 'busy', '--to', 'node-b', '--no-wait']);
  await until(async () => /busy was moved to node-b/.test(await text('#cluster-moves')), 'it to be there', 40_000);
  await until(async () => /node-b/.test(await text('#cluster-disks tr[data-disk=busy]')), 'whose it is now');
  for (const width of [320, 390, 768]) {
    await page.setViewportSize({ width, height: 844 });
    await sleep(300);
    const [wide, window] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
    assert.ok(wide <= window, `at ${width}: ${wide} of ${window}`);
  }
  // Of a disk that has gone there are no figures.
  clean(page, /status of 409/);
});

test('a daemon without a cluster has no such part, and asks for none', async () => {
  const alone = new Stage();
  try {
    alone.configure('');
    await alone.daemon();
    const page = await alone.open((await alone.dashboard()).url);
    await until(async () => /There are no disks yet/.test(await page.locator('#headline').innerText()), 'the page');
    assert.ok(!(await page.locator('#cluster').isVisible()));
    clean(page);
  } finally {
    await alone.end();
  }
});

test('sentences say how far a move is and what advice comes to', async () => {
  const { describe, sentence, summary } = await source('cluster');
  const move = { disk: 'web', id: '1', from: 'a', to: 'b', note: 'because' };
  assert.equal(sentence({ ...move, state: 'leaving' }), 'web is being moved from a to b: because');
  assert.equal(sentence({ ...move, state: 'failed' }), 'web was not moved to b: because');
  assert.equal(sentence({ ...move, state: 'done' }), 'web was moved to b');
  const advice = { hosts: [], moves: [], hits_now: 10, hits_here: 50, hits_then: 50, reads: 100, caveats: [] };
  assert.match(summary(advice), /10\.?0?\u00a0% .* No move is worthwhile/);
  assert.match(summary({ ...advice, reads: 0 }), /no advice/);
  const view = { state: 'suspended', host: 'a', etcd: ['http://e:1'], lease_seconds: 10, left_ms: 0, disks_held: 1 };
  assert.match(describe(view), /etcd does not answer/);
});

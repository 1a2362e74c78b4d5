// Who gets in, what other sites can do with somebody's browser, and what the page does when the daemon goes away.

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { after, before, test } from 'node:test';
import { busyStage, clean, freePort, sleep, until } from './stage.mjs';

const ADMIN = 'an-admin-token-0123456789abcdef';
const READER = 'a-reader-token-0123456789abcdef';

let stage;
let port;

before(async () => {
  port = await freePort();
  stage = await busyStage({ control: withTls });
});

after(() => stage?.end());

/** TLS with a certificate of its own, a token for each role, and a client certificate. */
function withTls(stage) {
  const openssl = (...args) => execFileSync('openssl', args, { stdio: 'pipe', cwd: stage.dir });
  const curve = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes'];
  openssl('req', '-x509', ...curve, '-days', '2', '-subj', '/CN=authority', '-keyout', 'ca.key', '-out', 'ca.pem');
  for (const [name, extension] of [['server', 'subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth\n'], ['ops', 'extendedKeyUsage=clientAuth\n']]) {
    writeFileSync(stage.path(`${name}.ext`), extension);
    openssl('req', ...curve, '-subj', `/CN=${name}`, '-keyout', `${name}.key`, '-out', `${name}.csr`);
    openssl('x509', '-req', '-in', `${name}.csr`, '-CA', 'ca.pem', '-CAkey', 'ca.key', '-days', '2', '-extfile', `${name}.ext`, '-out', `${name}.pem`);
  }
  writeFileSync(stage.path('admin'), ADMIN, { mode: 0o600 });
  writeFileSync(stage.path('reader'), READER, { mode: 0o600 });
  const at = (name) => `"${stage.path(name)}"`;
  return {
    listen: `"tcp:127.0.0.1:${port}"`,
    more:
      `tls = { cert = ${at('server.pem')}, key = ${at('server.key')}, client_ca = ${at('ca.pem')} }\ntoken_file = ${at('admin')}\n` +
      `[[control.token]]\nfile = ${at('reader')}\nrole = "read-only"\n[[control.client]]\ncertificate = "cn:ops"\nrole = "admin"\n`,
  };
}

const shares = () => stage.api('/v1/disks/web/qos').shares;

test('over TLS the page asks for a token, and shows nothing before', async () => {
  const page = await stage.open(`https://127.0.0.1:${port}/`, { ignoreHTTPSErrors: true });
  await page.locator('#lock').waitFor();
  assert.ok(!(await page.locator('#main').isVisible()));
  assert.match(await page.locator('#link').innerText(), /a token is required/);
  await page.fill('#token', 'wrong-wrong-wrong-wrong');
  await page.keyboard.press('Enter');
  await until(async () => (await page.locator('#lock').innerText()).includes('does not know this token'), 'the token is refused');
  await page.fill('#token', READER);
  await page.keyboard.press('Enter');
  await page.locator('#disks tr[data-disk=web]').waitFor();
  await until(async () => (await page.locator('#role').innerText()) === 'read-only', 'the role of the token');
  assert.ok(!(await page.content()).includes(READER), 'the token stands nowhere on the page');
  assert.equal(await page.evaluate(() => document.cookie + JSON.stringify(localStorage)), '{}');
  await page.reload();
  await page.locator('#disks tr[data-disk=web]').waitFor();
  clean(page, /status of 401/);
});

test('a token in the address is taken out of it', async () => {
  const { url } = await stage.dashboard();
  const page = await stage.open(url);
  await page.locator('#disks tr[data-disk=web]').waitFor();
  assert.ok(!page.url().includes('token'), page.url());
  assert.ok(url.includes('#token='));
  clean(page);
});

test('another site can change nothing with a browser that has a certificate or a token', async () => {
  const { url } = await stage.dashboard();
  const victims = [`https://127.0.0.1:${port}`, new URL(url).origin];
  // The other site: a name that is not ours, on a port that is not ours.
  const server = createServer((_, answer) => answer.writeHead(200, { 'Content-Type': 'text/html' }).end('<!doctype html><title>other</title>'));
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  const clientCertificates = [{ origin: victims[0], certPath: stage.path('ops.pem'), keyPath: stage.path('ops.key') }];
  const own = await stage.open(victims[0] + '/', { ignoreHTTPSErrors: true, clientCertificates });
  // The certificate alone opens the page: that is what another site could abuse.
  await own.locator('#disks tr[data-disk=web]').waitFor();
  const before = shares();
  const other = await own.context().newPage();
  await other.goto(`http://127.0.0.1:${server.address().port}/`);
  const answers = [];
  other.on('response', (response) => response.url().includes('/v1/') && answers.push([response.request().method(), response.status()]));
  for (const victim of victims) {
    const read = await other.evaluate(async (victim) => {
      const path = `${victim}/v1/disks/web/qos`;
      // A change in disguise, a question, and a change that asks first.
      await fetch(`${victim}/v1/disks/db/drain`, { method: 'POST', mode: 'no-cors', credentials: 'include', body: '{}' }).catch(() => {});
      await fetch(path, { method: 'PATCH', credentials: 'include', body: '{"shares":"low"}' }).catch(() => {});
      return fetch(path, { credentials: 'include' }).then((answer) => answer.text(), () => 'nothing');
    }, victim);
    assert.equal(read, 'nothing', `${victim} can be read from elsewhere`);
    // A form that posts leads there: the answer is a refusal.
    await other.evaluate((victim) => {
      const form = Object.assign(document.createElement('form'), { method: 'POST', action: `${victim}/v1/disks/db/drain` });
      document.body.append(form);
      form.submit();
    }, victim);
    await until(() => other.url().startsWith(victim), `the form led to ${victim}`);
    await other.goto(`http://127.0.0.1:${server.address().port}/`);
  }
  assert.ok(answers.length >= 4, JSON.stringify(answers));
  answers.forEach(([method, status]) => assert.equal(status, 403, `${method} was answered ${status}`));
  assert.equal(shares(), before);
  assert.ok(!stage.api('/v1/disks/db').cache.dirty.draining);
  server.close();
});

test('the page cannot be shown in a frame of another site', async () => {
  const { url } = await stage.dashboard();
  const server = createServer((_, answer) => answer.writeHead(200, { 'Content-Type': 'text/html' }).end(`<iframe src="${url}"></iframe>`));
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  const page = await stage.open(undefined);
  await page.goto(`http://127.0.0.1:${server.address().port}/`);
  await sleep(1000);
  const inner = page.frames()[1];
  assert.equal(await inner.locator('header').count().catch(() => 0), 0);
  server.close();
});

test('when the daemon goes the page says so, and follows it again by itself', async () => {
  const { url } = await stage.dashboard();
  const page = await stage.open(url);
  await page.locator('#disks tr[data-disk=web]').waitFor();
  await page.evaluate(() => (globalThis.isTheSame = true));
  await stage.stopDaemon();
  await until(async () => /trying again/.test(await page.locator('#link').innerText()), 'it says that the daemon is gone');
  assert.ok(await page.locator('body.stale').count(), 'old figures look old');
  assert.ok(await page.locator('#disks tr[data-disk=web]').isVisible(), 'but are still there');
  await stage.daemon();
  await until(async () => (await page.locator('#link').innerText()) === 'live', 'it is live again');
  await until(async () => (await page.locator('body.stale').count()) === 0, 'figures are fresh');
  assert.ok(await page.evaluate(() => globalThis.isTheSame), 'without a reload');
  clean(page, /Failed to load resource|ERR_INCOMPLETE_CHUNKED_ENCODING/);
});

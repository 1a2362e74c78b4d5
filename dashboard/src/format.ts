// Formats numbers: IOPS, MiB/s and ms with three digits, and a dash for unknown values.

export const NOTHING = '–';

function digits(value: number): string {
  const size = Math.abs(value);
  if (size === 0) return '0';
  if (size >= 99.95) return value.toFixed(0);
  if (size >= 9.995) return value.toFixed(1);
  return value.toFixed(2);
}

/** Formats a count with thin spaces between thousands. */
export function count(value: number | undefined): string {
  if (value === undefined || !Number.isFinite(value)) return NOTHING;
  return Math.round(value).toString().replace(/\B(?=(\d{3})+(?!\d))/g, '\u202f');
}

/** Formats a difference of counts, with its sign. */
export function signed(value: number): string {
  const size = count(Math.abs(value));
  return size === '0' ? size : `${value < 0 ? '−' : '+'}${size}`;
}

/** Formats requests per second, without the unit. */
export function iops(value: number | undefined): string {
  if (value === undefined || !Number.isFinite(value)) return NOTHING;
  return value < 9.95 && value > 0 ? value.toFixed(1) : count(value);
}

/** Formats bytes per second as MiB/s, without the unit. */
export function mib(bytes: number | undefined): string {
  return bytes === undefined || !Number.isFinite(bytes) ? NOTHING : digits(bytes / 1048576);
}

/** Formats nanoseconds as ms, without the unit. */
export function ms(nanos: number | undefined): string {
  if (nanos === undefined || !Number.isFinite(nanos)) return NOTHING;
  const value = nanos / 1e6;
  // The last bucket of the daemon's histograms has no upper bound.
  if (value > 137e3) return '> 137 s';
  return value > 0 && value < 0.0995 ? value.toFixed(3) : digits(value);
}

/** Formats nanoseconds as ms, with the unit. */
export function withMs(nanos: number | undefined): string {
  return nanos === undefined ? NOTHING : `${ms(nanos)}\u00a0ms`;
}

const SUFFIXES: [string, number][] = [
  ['PiB', 2 ** 50],
  ['TiB', 2 ** 40],
  ['GiB', 2 ** 30],
  ['MiB', 2 ** 20],
  ['KiB', 2 ** 10],
];

/** Formats bytes, rounded, with the unit. */
export function bytes(value: number | undefined): string {
  if (value === undefined || !Number.isFinite(value)) return NOTHING;
  const found = SUFFIXES.find(([, size]) => value >= size);
  if (!found) return `${Math.round(value)}\u00a0B`;
  const shown = value / found[1];
  return `${Number.isInteger(shown) ? shown : digits(shown)}\u00a0${found[0]}`;
}

/** Formats bytes exactly, in the shortest form that a user can type, such as 8G. */
export function exactBytes(value: number): string {
  for (const [suffix, size] of SUFFIXES) {
    if (value >= size && value % size === 0) return `${value / size}${suffix[0]}`;
  }
  return value.toString();
}

/** Formats a share of 1 as percent. */
export function percent(share: number | undefined): string {
  if (share === undefined || !Number.isFinite(share)) return NOTHING;
  const value = 100 * share;
  const shown = value > 0 && value < 0.1 ? '<\u2009'.concat('0.1') : value < 9.95 && value > 0 ? value.toFixed(1) : value.toFixed(0);
  return `${shown}\u00a0%`;
}

/** Formats seconds: 42 s, 3 min 5 s, 2 h 10 min. */
export function duration(seconds: number): string {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return whole % 60 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${whole / 60} min`;
  const minutes = Math.floor((whole % 3600) / 60);
  if (whole < 86400) return minutes ? `${Math.floor(whole / 3600)} h ${minutes} min` : `${whole / 3600} h`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** Formats shares with their name on the command line, if they have one. */
export function shares(value: number): string {
  const names: Record<number, string> = { 500: 'low', 1000: 'normal', 2000: 'high' };
  const name = names[value];
  return name ? `${name} (${value})` : value.toString();
}

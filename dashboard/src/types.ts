// What the API says, as far as the page reads it. docs/openapi.json is the whole of it.

export type CacheState = 'none' | 'active' | 'changing' | 'recovering' | 'stalled' | 'fenced';
export type Role = 'admin' | 'read-only';

export interface Problem {
  error: string;
  hint?: string;
}

export interface HealthProblem {
  kind: string;
  subject: string;
  reason: string;
}

export interface Health {
  status: 'ok' | 'degraded';
  problems: HealthProblem[];
}

export interface Device {
  path: string;
  state: 'online' | 'stalled' | 'fenced' | 'offline';
  reason?: string;
  admission: 'in' | 'out';
  size: number;
  free: number;
  io?: 'direct' | 'buffered' | 'memory';
}

/** Limits of a shared cache. */
export interface SharedLimits {
  /** 0 for one segment. */
  min: number;
  /** 0 for none. */
  max: number;
  shares: number;
  pin: boolean;
}

/** A cache whose size hob chooses. */
export interface SharedCache {
  disk: string;
  size: number;
  /** 0 until hob has chosen a size. */
  target: number;
  limits: SharedLimits;
  reads_per_second: number;
  hit_permille: number;
  more_hits_per_second: number;
  gained_hits_per_second: number;
}

/** The part of a pool that shared caches divide. */
export interface SharedCapacity {
  size: number;
  moved: number;
  destaged: number;
  caches: SharedCache[];
}

export interface Pool {
  name: string;
  segment_size: number;
  size: number;
  free: number;
  devices: Device[];
  caches: string[];
  /** Absent without shared caches. */
  shared?: SharedCapacity;
  /** Absent from earlier versions of the daemon. */
  flash_writes?: FlashWritesUsage;
  orphans?: { owner: string; size: number }[];
}

/** Flash writes of a pool's caches, bytes. */
export interface FlashWritesUsage {
  /** Absent without a budget. */
  budget?: string;
  bytes_per_day: number;
  written_day: number;
  covered_seconds: number;
  refused: number;
  saved: number;
  debt: number;
  loan: number;
}

export interface DeviceFigures {
  ios: number;
  errors: number;
  read_bytes: number;
  written_bytes: number;
  in_flight: number;
}

export interface PoolNow {
  pool: Pool;
  devices: (DeviceFigures | null)[];
}

export interface Dirty {
  size: number;
  lost: number;
  draining: boolean;
  rate: number;
  eta_seconds?: number;
  why?: string;
}

export interface Cache {
  pool: string;
  state: CacheState;
  reason?: string;
  size: number;
  /** Absent for a cache with a fixed size. */
  shared?: SharedCache;
  room: number;
  journal: number;
  preset?: string;
  block_size: number;
  policy: string;
  mode: string;
  persistent: boolean;
  admission: string;
  dirty_start: number;
  dirty_full: number;
  ram: number;
  dirty?: Dirty;
}

/** Is the backing connected, and does it answer? */
export type BackingState =
  | { state: 'connected' }
  | { state: 'slow'; oldest_request_ms: number; waiting_requests: number }
  | { state: 'failing'; since_seconds: number; failed_last_minute: number; last_error: string }
  | { state: 'reconnecting'; since_seconds: number; last_error: string; waiting_requests: number }
  | { state: 'failed'; since_seconds: number; last_error: string };

export interface Disk {
  name: string;
  state: 'online' | 'offline' | 'removing';
  reason?: string;
  backing: string;
  /** Absent while the disk is not served. */
  backing_state?: BackingState;
  size: number;
  read_only: boolean;
  cache?: Cache;
}

export interface Qos {
  shares: number;
  reservation: number;
  limit?: number;
  bytes_limit?: number;
  flash_limit?: number;
}

export interface DiskQos extends Qos {
  disk: string;
  datastore?: string;
  policy?: string;
  notes?: string[];
}

export interface Outcome {
  class: string;
  reason: string;
  count: number;
  latency_sum_ns: number;
}

export interface Io {
  ios: number;
  errors: number;
  units: number;
  waited_ns: number;
  total_ns: number;
  read_bytes: number;
  write_bytes: number;
}

export interface Figures {
  elapsed_ns: number;
  reads: number;
  writes: number;
  read_bytes: number;
  write_bytes: number;
  read_hits: number;
  memory_hits: number;
  in_flight: number;
  outcomes: Outcome[];
  latency: [number, number][];
  flash: Io;
  backing: Io;
  cache_bytes: number;
  used_bytes: number;
  dirty_bytes: number;
  destaged_bytes: number;
  is_draining: boolean;
}

export interface DiskNow {
  disk: Disk;
  qos?: DiskQos;
  figures?: Figures;
}

export interface Datastore {
  name: string;
  control: string;
  latency_ms: number;
  capacity?: number;
  peak: number;
  reserved: number;
  disks: string[];
  window?: number;
  in_flight: number;
  waiting: number;
  latency_ns: number;
  knee_ns?: number;
}

export interface Version {
  name: string;
  version: string;
  pid: number;
  shards: number;
}

export interface Snapshot {
  at_ms: number;
  version: Version;
  health: Health;
  pools: PoolNow[];
  disks: DiskNow[];
  datastores?: Datastore[];
  cluster?: ClusterView;
  tasks?: Task[];
}

/** A change that continues in the background, or ended after its request was answered. */
export interface Task {
  id: number;
  what: string;
  subject: string;
  state: 'running' | 'done' | 'failed' | 'cancelled';
  age_seconds: number;
  ended_seconds_ago?: number | null;
  dirty?: Dirty | null;
  can_cancel: boolean;
  error?: string | null;
}

/** This host as a member of its cluster. */
export interface ClusterView {
  state: 'member' | 'joining' | 'suspended';
  host: string;
  etcd: string[];
  lease_seconds: number;
  left_ms: number;
  disks_held: number;
  why?: string;
}

export interface ClusterHost {
  name: string;
  address?: string;
  version: string;
  pools: { name: string; size: number; free: number }[];
  disks: number;
}

export interface ClusterDisk {
  name: string;
  state: 'held' | 'adopted' | 'free' | 'vanished';
  host: string;
  generation: number;
  dirty: boolean;
}

export interface ClusterMove {
  disk: string;
  id: string;
  from: string;
  to: string;
  state: 'asked' | 'offered' | 'welcome' | 'leaving' | 'given' | 'done' | 'failed';
  note?: string;
}

export interface AdvisedHost {
  name: string;
  free: number;
  to_spare: number;
  load: number;
  hit_percent: number;
  hit_percent_then: number;
}

export interface AdvisedMove {
  disk: string;
  from: string;
  to: string;
  hit_percent: number;
  hit_percent_at_once: number;
  hit_percent_then: number;
  gain: number;
}

export interface ClusterAdvice {
  hosts: AdvisedHost[];
  moves: AdvisedMove[];
  hits_now: number;
  hits_here: number;
  hits_then: number;
  reads: number;
  caveats: string[];
}

export interface Histogram {
  metric: string;
  title: string;
  unit: string;
  class: 'all' | 'reads' | 'writes';
  count: number;
  min: number | null;
  max: number | null;
  mean: number | null;
  buckets: { up_to: number | null; count: number }[];
}

export interface Histograms {
  disk: string;
  elapsed_ns: number;
  histograms: Histogram[];
}

export interface BlockCurve {
  block_size: number;
  accesses: number;
  samples: number;
  sample_rate: number;
  footprint_bytes: number;
  points: { cache_bytes: number; miss_ratio: number }[];
}

export interface Curve {
  disk: string;
  elapsed_ns: number;
  reads: number;
  hit_percent: number;
  cache: { size: number; block_size: number; policy: string; mode: string; expected_hit_percent: number } | null;
  block_sizes: BlockCurve[];
}

export interface Explanation {
  disk: string;
  sentences: string[];
}

//! The API over real sockets, with a simulated shard that moves no data.

use std::path::Path;

use hob_control::client::{Client, ClientError};
use hob_control::{
    Admission, CacheEnable, CachePatch, CacheSettings, DeviceAdd, DevicePatch, DiskAdd, DrainFor, Endpoint,
    ExportDirty, OnClients, OnDirty, PoolCreate, Size,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::*;
use crate::exports::Exports;
use crate::fake_shard::FakeShard;
use crate::hardware::BackingOptions;
use crate::listening_sockets::ListeningSockets;
use crate::state::Store;

mod dashboard;
mod monitor;
mod tls;
mod trace;

const MIB: u64 = 1 << 20;

fn run(test: impl AsyncFnOnce(&Path, Endpoint)) {
    run_with_shard(async |dir, endpoint, _| test(dir, endpoint).await);
}

/// Serves the API, and runs a test with a directory, the address, and the simulated shard.
fn run_with_shard(test: impl AsyncFnOnce(&Path, Endpoint, FakeShard)) {
    crate::background::run_in_real_time(async {
        let dir = tempfile::tempdir().unwrap();
        let endpoint = Endpoint::Unix(dir.path().join("c.sock"));
        let listener =
            ControlListener::bind(endpoint.clone(), &Guard::default(), &ListeningSockets::default())
                .await
                .unwrap();
        let (services, shard) = services_with_shard();
        tokio::spawn(listener.serve(router(services)));
        test(dir.path(), endpoint, shard).await;
    });
}

fn services() -> Arc<Services> {
    services_with_shard().0
}

fn services_with_shard() -> (Arc<Services>, FakeShard) {
    let (shard, fake) = FakeShard::start();
    let options = BackingOptions::default();
    (Services::new(vec![shard], Exports::default(), options, Store::Memory), fake)
}

/// Returns the status and body of the response to a hand-written request.
async fn raw(endpoint: &Endpoint, request: &str) -> (u16, String) {
    let Endpoint::Unix(path) = endpoint else { panic!("a Unix socket") };
    let mut stream = UnixStream::connect(path).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let body = answer.split_once("\r\n\r\n").unwrap().1.to_owned();
    (status, body)
}

async fn send(endpoint: &Endpoint, method: &str, path: &str, body: &str) -> (u16, String) {
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\nHost: hob\r\nConnection: close\r\nContent-Length: {length}\r\n");
    raw(endpoint, &format!("{head}\r\n{body}")).await
}

#[test]
fn a_client_can_do_everything() {
    run(async |dir, endpoint| {
        let client = Client::new(endpoint, None);
        let path = |name: &str| dir.join(name).to_string_lossy().into_owned();
        assert_eq!(client.version().await.unwrap().name, "hob");
        assert!(client.pools().await.unwrap().is_empty());
        let size = Some(Size(hob_storage::pool::device_bytes_for(5 * MIB, MIB)));
        let create = PoolCreate {
            name: "p".into(),
            devices: vec![path("a")],
            size,
            segment_size: Some(Size(MIB)),
            force: false,
            flash_writes: None,
        };
        let pool = client.pool_create(&create, OnDirty::Drain).await.unwrap().pool.unwrap();
        assert_eq!((pool.size, pool.devices.len()), (Size(5 * MIB), 1));
        // A path with all characters that need escaping.
        let odd = path("ö d&d?=%/");
        let odd = odd.trim_end_matches('/').to_owned();
        client
            .device_add("p", &DeviceAdd { path: odd.clone(), size, peer: None, force: false }, OnDirty::Drain)
            .await
            .unwrap();
        assert_eq!(client.pool("p").await.unwrap().devices.len(), 2);
        let patch = DevicePatch { admission: Admission::Out };
        let pool = client.device_set("p", &odd, &patch).await.unwrap().pool.unwrap();
        assert_eq!((pool.devices[1].admission, pool.free), (Admission::Out, Size(5 * MIB)));
        client.device_remove("p", &odd, OnDirty::Drain).await.unwrap();
        std::fs::File::create(dir.join("vm.img")).unwrap().set_len(8 * MIB).unwrap();
        let add =
            DiskAdd { name: "vm".into(), backing: path("vm.img"), read_only: false, ..DiskAdd::default() };
        assert_eq!(client.disk_add(&add).await.unwrap().disk.unwrap().size, Size(8 * MIB));
        let enable =
            CacheEnable { pool: "p".into(), size: Some(Size(2 * MIB)), settings: CacheSettings::default() };
        client.cache_enable("vm", &enable).await.unwrap();
        let patch = CachePatch { size: Some(Size(3 * MIB)), ..CachePatch::default() };
        let disk = client.cache_patch("vm", &patch).await.unwrap().disk.unwrap();
        assert_eq!(disk, client.disk("vm").await.unwrap());
        assert_eq!(disk.cache.unwrap().room, Size(3 * MIB));
        client.cache_clear("vm").await.unwrap();
        let stats = client.stats("vm").await.unwrap();
        assert_eq!((stats.disk.as_str(), stats.blocks, stats.vsphere.num_blocks), ("vm", 768, 768));
        assert_eq!(stats.outcomes.len(), hob_engine::outcome::Outcome::COUNT);
        let found = client.histograms_reset("vm").await.unwrap();
        assert_eq!(found.histograms.len(), 18);
        assert_eq!(client.histograms("vm").await.unwrap().histograms, found.histograms);
        let curve = client.curve_reset("vm").await.unwrap();
        assert_eq!((curve.reads, curve.block_sizes.len()), (0, 3));
        assert_eq!(curve.cache.as_ref().unwrap().size, Size(3 * MIB));
        assert_eq!(client.curve("vm").await.unwrap().block_sizes, curve.block_sizes);
        let explanation = client.explain("vm").await.unwrap();
        assert!(explanation.sentences[0].contains("empty"), "{explanation:?}");
        let settings = CacheSettings { preset: Some("auto".into()), ..CacheSettings::default() };
        let cache = client.cache_patch("vm", &CachePatch { size: None, settings }).await.unwrap();
        let cache = cache.disk.unwrap().cache.unwrap();
        assert_eq!((cache.mode.as_str(), cache.preset.as_deref()), ("write-back", Some("auto")));
        let notes = client.drain("vm", DrainFor::Drain).await.unwrap().notes;
        assert!(notes.is_empty(), "{notes:?}");
        client.drain_stop("vm").await.unwrap();
        let export = ExportDirty { path: path("rescue") };
        let error = client.export_dirty("vm", &export).await.unwrap_err().to_string();
        assert!(error.contains("vm is online"), "{error}");
        let notes = client.discard_dirty("vm").await.unwrap().notes;
        assert_eq!(notes, ["there was no dirty data, so nothing is lost"]);
        client.cache_disable("vm", OnDirty::Drain).await.unwrap();
        client.disk_remove("vm", OnDirty::Drain, OnClients::Refuse).await.unwrap();
        client.pool_remove("p").await.unwrap();
        assert!(client.disks().await.unwrap().is_empty() && client.pools().await.unwrap().is_empty());
    });
}

#[test]
fn what_is_wrong_is_said_in_json_with_the_right_status() {
    run(async |_, endpoint| {
        let long = format!("{{\"name\":\"{}\"}}", "x".repeat(BODY_BYTES_MAX));
        for (method, path, body, status, part) in [
            ("GET", "/v2/pools", "", 404, "openapi.json"),
            ("POST", "/", "", 405, "method"),
            ("GET", "/assets/other.js", "", 404, "openapi.json"),
            ("PUT", "/v1/pools", "", 405, "method"),
            ("PUT", "/v1/cluster", "", 405, "method"),
            ("PUT", "/v1/tasks", "", 405, "method"),
            ("GET", "/v1/pools/none", "", 404, "'none'"),
            ("GET", "/v1/disks/none", "", 404, "'none'"),
            ("GET", "/v1/disks/none/stats", "", 404, "'none'"),
            ("GET", "/v1/disks/none/explain", "", 404, "'none'"),
            ("GET", "/v1/disks/none/histograms", "", 404, "'none'"),
            ("GET", "/v1/disks/none/histograms?format=xml", "", 400, "format=csv"),
            ("GET", "/v1/disks/none/histograms?form=csv", "", 400, "format=csv"),
            ("DELETE", "/v1/disks/none/histograms", "", 404, "'none'"),
            ("GET", "/v1/disks/none/curve", "", 404, "'none'"),
            ("DELETE", "/v1/disks/none/curve", "", 404, "'none'"),
            ("GET", "/v1/disks/none/trace", "", 404, "'none'"),
            ("POST", "/v1/disks/none/drain", "", 404, "'none'"),
            ("DELETE", "/v1/disks/none/drain", "", 404, "'none'"),
            ("POST", "/v1/disks/none/cache/discard-dirty", "", 404, "'none'"),
            ("DELETE", "/v1/disks/none?discard_dirty=true", "", 404, "'none'"),
            ("DELETE", "/v1/disks/none?discard=true", "", 400, "discard_dirty=true"),
            ("DELETE", "/v1/disks/none/cache?discard_dirty=maybe", "", 400, "discard_dirty=true"),
            ("GET", "/v1/cluster/advice?leave=a", "", 400, "leaving"),
            ("DELETE", "/v1/tasks/7", "", 404, "no task 7"),
            ("POST", "/v1/tasks/7/acknowledge", "", 404, "no task 7"),
            ("POST", "/v1/tasks/first/acknowledge", "", 404, "tasks have numbers"),
            ("DELETE", "/v1/pools/none/orphans/xyz", "", 422, "32 hexadecimal"),
            ("GET", "/v1/disks/%2e%2e%2fpools", "", 404, "'../pools'"),
            ("GET", "/v1/disks/%ff", "", 400, "UTF-8"),
            ("POST", "/v1/disks", "", 400, "EOF"),
            ("POST", "/v1/disks", "{\"name\":", 400, "EOF"),
            ("POST", "/v1/disks", "[1]", 400, "body is invalid"),
            ("POST", "/v1/disks", "{\"name\":\"a\",\"backing\":\"/x\",\"red_only\":true}", 400, "red_only"),
            ("POST", "/v1/disks", "{\"name\":\"a\",\"backing\":\"/nonexistent/x\"} x", 400, "trailing"),
            ("POST", "/v1/disks", "{\"name\":\"a\",\"backing\":\"/nonexistent/x\"}", 422, "/nonexistent/x"),
            ("POST", "/v1/disks", "{\"name\":\"\",\"backing\":\"/x\"}", 422, "name"),
            ("POST", "/v1/disks", &long, 413, "64 KiB"),
            ("PUT", "/v1/disks/none/cache", "7", 400, "integer `7`, expected an object"),
            ("PATCH", "/v1/disks/none/cache", "{\"dirty_start\":300}", 400, "an integer from 0 to 255"),
            ("POST", "/v1/disks", "{\"name\":\"a\",\"backing\":\"ftp://x/y\"}", 422, "nbd://HOST"),
            ("POST", "/v1/pools", "{\"name\":\"p\",\"devices\":[\"/x\"],\"size\":\"lots\"}", 400, "64M"),
            ("DELETE", "/v1/pools/p/devices", "", 400, "?path="),
            ("PATCH", "/v1/pools/p/devices", "{\"admission\":\"in\"}", 400, "?path="),
            ("PATCH", "/v1/pools/p/devices?path=/a", "{\"admission\":\"maybe\"}", 400, "maybe"),
            ("PATCH", "/v1/pools/none/devices?path=/a", "{\"admission\":\"in\"}", 404, "'none'"),
            ("PATCH", "/v1/disks/none/cache", "{\"size\":\"1M\"}", 404, "'none'"),
            ("POST", "/v1/disks/none/drain?operation=resize", "", 422, "cache-disable"),
            ("POST", "/v1/disks/none/drain?for=x", "", 400, "?operation="),
            ("POST", "/v1/disks/none/drain?operation=detach", "", 404, "'none'"),
            ("PUT", "/v1/disks/none/cache", "{\"size\":\"1M\"}", 400, "pool"),
        ] {
            let (got, answer) = send(&endpoint, method, path, body).await;
            assert_eq!(got, status, "{method} {path}: {answer}");
            let problem: Problem =
                serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{answer}: {error}"));
            assert!(problem.to_string().contains(part), "{method} {path}: {problem}");
        }
        let client = Client::new(endpoint, None);
        assert!(matches!(client.disk("none").await, Err(ClientError::Refused { status: 404, .. })));
    });
}

#[test]
fn system_errors_are_said_without_their_numbers() {
    run(async |_, endpoint| {
        let add = "{\"name\":\"a\",\"backing\":\"/nonexistent/x\"}";
        let (_, answer) = send(&endpoint, "POST", "/v1/disks", add).await;
        let cause = std::io::Error::from_raw_os_error(2).to_string();
        let words = cause.strip_suffix(" (os error 2)").unwrap();
        assert!(answer.contains(words) && !answer.contains("os error"), "{answer}");
    });
}

#[test]
fn garbage_closes_one_connection_and_no_other() {
    run(async |_, endpoint| {
        let Endpoint::Unix(path) = &endpoint else { panic!("a Unix socket") };
        let idle = UnixStream::connect(path).await.unwrap();
        for garbage in ["\0\0\0\0\r\n\r\n", "GET\r\n\r\n", "GET / HTTP/9.9\r\n\r\n"] {
            let mut stream = UnixStream::connect(path).await.unwrap();
            stream.write_all(garbage.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
        }
        assert_eq!(send(&endpoint, "GET", "/healthz", "").await, (200, "ok\n".to_owned()));
        drop(idle);
    });
}

#[test]
fn the_openapi_document_describes_every_path() {
    run(async |_, endpoint| {
        let (status, text) = send(&endpoint, "GET", "/openapi.json", "").await;
        assert_eq!((status, &text), (200, &openapi_json()));
        let document: serde_json::Value = serde_json::from_str(&text).unwrap();
        let paths = document["paths"].as_object().unwrap();
        for (path, methods) in [
            ("/healthz", &["get"][..]),
            ("/metrics", &["get"]),
            ("/v1/health", &["get"]),
            ("/v1/load", &["get"]),
            ("/v1/events", &["get"]),
            ("/v1/version", &["get"]),
            ("/v1/pools", &["get", "post"]),
            ("/v1/pools/{pool}", &["get", "delete"]),
            ("/v1/pools/{pool}/devices", &["get", "post", "patch", "delete"]),
            ("/v1/disks", &["get", "post"]),
            ("/v1/disks/{disk}", &["get", "delete"]),
            ("/v1/disks/{disk}/cache", &["get", "put", "patch", "delete"]),
            ("/v1/disks/{disk}/cache/clear", &["post"]),
            ("/v1/disks/{disk}/stats", &["get"]),
            ("/v1/disks/{disk}/histograms", &["get", "delete"]),
            ("/v1/disks/{disk}/curve", &["get", "delete"]),
            ("/v1/disks/{disk}/explain", &["get"]),
            ("/v1/disks/{disk}/trace", &["get"]),
        ] {
            let found =
                paths.get(path).and_then(serde_json::Value::as_object).unwrap_or_else(|| panic!("{path}"));
            for method in methods {
                assert!(found.contains_key(*method), "{method} {path}");
            }
        }
        for (path, methods) in paths {
            let methods = methods.as_object().unwrap().values();
            for parameter in methods.filter_map(|method| method["parameters"].as_array()).flatten() {
                let name = parameter["name"].as_str().unwrap();
                assert_eq!(
                    parameter["in"] == "path",
                    path.contains(&format!("{{{name}}}")),
                    "{path}: {name}"
                );
            }
        }
        for schema in ["Size", "Pool", "DiskStats", "VsphereStats", "Explanation", "Problem"] {
            assert!(document["components"]["schemas"].get(schema).is_some(), "{schema}");
        }
        assert!(text.contains("Evict:avgNumBlocksPerOp"));
    });
}

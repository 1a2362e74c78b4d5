//! Tests of cache settings: a valid request gives the expected configuration of the cache, and an
//! invalid request gives an error that says what to do.

use hob_engine::command::Layout;
use hob_engine::granularity::Fill;

use super::*;

const CONTEXT: CacheContext = CacheContext { segment_bytes: 1 << 20, devices: 2, peers: 0 };
const ALONE: CacheContext = CacheContext { devices: 1, ..CONTEXT };

fn settings(json: &str) -> CacheSettings {
    let text = format!(r#"{{"pool":"p","size":1048576{}{json}}}"#, if json.is_empty() { "" } else { "," });
    serde_json::from_str::<hob_control::CacheEnable>(&text).unwrap().settings
}

fn new(json: &str, context: CacheContext) -> Result<(CacheSpec, Vec<String>), ApiError> {
    new_spec("p".into(), Some(Size(1 << 20)), &settings(json), context)
}

#[test]
fn without_words_a_cache_is_vfrc() {
    let (spec, notes) = new("", CONTEXT).unwrap();
    assert_eq!((spec.mode, &spec.journal, preset_of(&spec)), (Mode::WriteThrough, &None, Some("vfrc")));
    assert!(notes.is_empty());
}

#[test]
fn each_preset_is_recognised_by_its_parts_and_no_more_when_one_changes() {
    for row in PRESETS {
        let (spec, notes) = new(&format!(r#""preset":"{}""#, row.name), CONTEXT).unwrap();
        assert_eq!((preset_of(&spec), notes.len()), (Some(row.name), 0));
        let config = engine_config(&spec, 16 << 20).unwrap();
        assert_eq!(config, row.config(16 << 20), "{}", row.name);
        assert_eq!(spec.journal.is_some(), row.persistent);
        let (spec, _) = new(&format!(r#""preset":"{}","dirty_age_max":77"#, row.name), CONTEXT).unwrap();
        assert_eq!((preset_of(&spec), spec.destage.dirty_age_max), (None, 77));
    }
}

#[test]
fn every_part_can_be_set_by_itself() {
    let (spec, _) = new(
        r#""mode":"write-back","layout":"split:60","admission":"ghost+not-sequential:1M","destage_order":"coldest",
           "dirty_start":11,"dirty_stop":7,"dirty_full":33,"dirty_age_max":0,"copies":"2","ordered":true,
           "block_size":"64K","policy":"lru""#,
        CONTEXT,
    )
    .unwrap();
    let config = engine_config(&spec, 1 << 20).unwrap();
    assert_eq!((config.mode, config.copies, config.block_bytes), (Mode::WriteBack, Copies::TwoOfAll, 65536));
    assert_eq!(config.layout, Layout::Split { read_permille: 600 });
    assert_eq!(config.admission.to_string(), "ghost+not-sequential:1M");
    let destage = config.destage;
    assert_eq!((destage.start_permille, destage.stop_permille, destage.full_permille), (110, 70, 330));
    assert_eq!((destage.dirty_age_ms_max, destage.ordered, destage.order.name()), (0, true, "coldest"));
}

#[test]
fn presets_set_the_fill_granularity() {
    let (spec, _) = new(r#""preset":"zbs","fill":"auto""#, CONTEXT).unwrap();
    assert_eq!((engine_config(&spec, 1 << 20).unwrap().fill, preset_of(&spec)), (Fill::Auto, None));
    let (again, _) = changed_spec(&spec, None, &settings(r#""preset":"zbs""#), CONTEXT).unwrap();
    assert_eq!((again.fill, preset_of(&again)), (Fill::Sectors, Some("zbs")));
    let (again, _) = changed_spec(&spec, None, &settings(r#""preset":"vfrc""#), CONTEXT).unwrap();
    assert_eq!((again.fill, preset_of(&again)), (Fill::Auto, Some("vfrc")));
    let (other, _) = changed_spec(&spec, None, &settings(r#""fill":"sectors""#), CONTEXT).unwrap();
    assert_eq!(other.fill, Fill::Sectors);
    assert!(spec.structure() == other.structure(), "the cache keeps its contents");
}

#[test]
fn write_back_is_persistent_and_stays_so_when_the_mode_changes() {
    let (spec, _) = new(r#""mode":"write-back""#, CONTEXT).unwrap();
    let owner = spec.journal.unwrap().owner;
    let (spec, _) = changed_spec(&spec, None, &settings(r#""mode":"write-around""#), CONTEXT).unwrap();
    assert_eq!(spec.journal.as_ref().unwrap().owner, owner);
    let (spec, _) = changed_spec(&spec, None, &settings(r#""preset":"zbs""#), CONTEXT).unwrap();
    assert_eq!((spec.journal.as_ref().unwrap().owner, preset_of(&spec)), (owner, Some("zbs")));
    let (spec, _) = changed_spec(&spec, None, &settings(r#""preset":"vfrc""#), CONTEXT).unwrap();
    assert_eq!((spec.journal, preset_of(&spec)), (None, Some("vfrc")));
}

#[test]
fn write_back_with_an_admission_that_refuses_writes_is_noted() {
    let (spec, notes) = new(r#""mode":"write-back""#, CONTEXT).unwrap();
    assert_eq!((spec.admission.to_string().as_str(), notes.len()), ("auto", 0));
    let (spec, _) = new(r#""persistent":true,"admission":"ghost""#, CONTEXT).unwrap();
    let (_, notes) = changed_spec(&spec, None, &settings(r#""mode":"write-back""#), CONTEXT).unwrap();
    assert!(
        notes[0].contains("ghost, some writes wait") && notes[0].contains("--admission auto"),
        "{notes:?}"
    );
}

#[test]
fn one_device_is_said_refused_or_overruled() {
    let (spec, notes) = new(r#""preset":"auto""#, ALONE).unwrap();
    assert_eq!((spec.copies, preset_of(&spec)), (Copies::One, Some("auto")));
    assert!(notes[0].contains("one device") && notes[0].contains("2-dirty"), "{notes:?}");
    for json in [r#""preset":"zbs""#, r#""preset":"fast-cache""#, r#""preset":"auto","copies":"2-dirty""#] {
        let error = new(json, ALONE).unwrap_err().to_string();
        assert!(error.contains("two flash devices") && error.contains("--copies 1"), "{error}");
        assert!(new(json, CONTEXT).is_ok());
    }
    let (spec, _) = new(r#""preset":"zbs","copies":"1""#, ALONE).unwrap();
    assert_eq!(spec.copies, Copies::One);
}

#[test]
fn conflicting_settings_are_refused_with_a_suggestion() {
    for (json, part) in [
        (r#""mode":"write-back","persistent":false"#, "journal"),
        (r#""preset":"vfrc","persistent":true"#, "vfrc requires a volatile"),
        (r#""preset":"vfrc","mode":"write-back""#, "vfrc requires a volatile"),
        (r#""copies":"2""#, "make the cache persistent"),
        (r#""mode":"write-off""#, "write-through, write-back"),
        (r#""layout":"split:0""#, "split:PERCENT"),
        (r#""admission":"nth-access:9""#, "nth-access:N"),
        (r#""fill":"blocks""#, "sectors, block, auto"),
        (r#""destage_order":"up""#, "elevator, coldest"),
        (r#""copies":"3","persistent":true"#, "2-dirty"),
        (r#""preset":"emc""#, "fast-cache"),
        (r#""dirty_stop":50,"dirty_start":40"#, "dirty_stop (50)"),
        (r#""dirty_full":101"#, "100 percent"),
        (r#""dirty_full":0,"dirty_start":0,"dirty_stop":0"#, "1 to 100"),
        (r#""block_size":5000"#, "power of two"),
        (r#""policy":"best""#, "s3-fifo"),
    ] {
        let error = new(json, CONTEXT).unwrap_err();
        assert!(error.to_string().contains(part), "{json}: {error}");
    }
}

#[test]
fn a_copy_at_a_peer_needs_a_peer_and_write_back_and_no_second_device() {
    let lent = CacheContext { peers: 1, ..ALONE };
    let (spec, _) = new(r#""mode":"write-back","copies":"peer""#, lent).unwrap();
    assert_eq!((spec.copies, spec.journal.is_some()), (Copies::Peer, true));
    for (json, context, part) in [
        (r#""mode":"write-back","copies":"peer""#, CONTEXT, "add-device POOL --peer"),
        (r#""persistent":true,"copies":"peer""#, lent, "write-back"),
        (r#""copies":"peer""#, lent, "make the cache persistent"),
    ] {
        let error = new(json, context).unwrap_err();
        assert!(error.to_string().contains(part), "{json}: {error}");
    }
    assert!(changed_spec(&spec, None, &settings(r#""mode":"write-through""#), lent).is_err());
    assert!(simulated(Size(1 << 20), &settings(r#""mode":"write-back","copies":"peer""#), 1 << 20).is_err());
}

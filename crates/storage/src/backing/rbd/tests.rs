//! Images of a simulated librbd, which behaves like librbd in unusual cases.

use std::cell::{Cell, RefCell};
use std::ffi::c_char;

use hob_engine::io::{BufferSlice, Target};
use hob_engine::units::DiskId;

use super::library::{DiffCallback, Handle, ImageInfo, LinkedImageSpec, SnapInfo, SnapSpec};
use super::*;
use crate::backing::OwnMap;
use crate::ring::RingConfig;

const OBJECT: u64 = 4 << 20;
const OBJECTS: u64 = 4;

/// An image that all of its handles refer to. Its memory is never freed.
#[derive(Default)]
struct Fake {
    /// Flags of the object maps of the image and of its snapshots, by the snapshot's id; 0 is the
    /// image.
    flags: RefCell<HashMap<u64, u64>>,
    /// Ids of the snapshots; all are called `snap`.
    snapshots: Vec<u64>,
    /// Snapshot whose object map librbd finds damaged.
    damaged: Cell<Option<u64>>,
    /// Snapshot that the second handle is set to.
    set_to: Cell<u64>,
    size_bytes: Cell<u64>,
    /// Requests that have not ended.
    asked: RefCell<VecDeque<(&'static str, Handle)>>,
    ended: RefCell<VecDeque<Handle>>,
}

/// Difference between the second handle of an image and the first handle.
const ASIDE: usize = 1;

fn fake(handle: Handle) -> &'static Fake {
    // SAFETY: handles are addresses of leaked fakes, or one byte past them.
    unsafe { &*handle.map_addr(|at| at & !ASIDE).cast::<Fake>() }
}

fn library() -> Library {
    unsafe extern "C" fn close(_: Handle) -> c_int {
        0
    }
    unsafe extern "C" fn end(_: Handle) {}
    Library {
        rbd_close: close,
        rbd_lock_release: close,
        rados_ioctx_destroy: end,
        rados_shutdown: end,
        ..Library::made_up()
    }
}

/// A clone without own data except its second object, which is empty and hides the parent's object.
mod cloned {
    use super::*;

    unsafe extern "C" fn number(_: Handle, number: *mut u64) -> c_int {
        // SAFETY: the caller provides this memory for the result.
        unsafe { *number = OBJECTS * OBJECT };
        0
    }

    unsafe extern "C" fn features(_: Handle, features: *mut u64) -> c_int {
        // SAFETY: as above.
        unsafe { *features = !2 };
        0
    }

    unsafe extern "C" fn stat(_: Handle, info: *mut ImageInfo, _: usize) -> c_int {
        // SAFETY: as above.
        unsafe { (*info).obj_size = OBJECT };
        0
    }

    unsafe extern "C" fn flags(image: Handle, flags: *mut u64) -> c_int {
        let at = if image.addr() & ASIDE == 0 { 0 } else { fake(image).set_to.get() };
        let found = fake(image).flags.borrow().get(&at).copied();
        // SAFETY: as above.
        unsafe { *flags = found.unwrap_or(0) };
        0
    }

    unsafe extern "C" fn parent(_: Handle, _: *mut LinkedImageSpec, _: *mut SnapSpec) -> c_int {
        0
    }

    unsafe extern "C" fn forget_parent(_: *mut LinkedImageSpec) {}

    unsafe extern "C" fn forget_snapshot(_: *mut SnapSpec) {}

    unsafe extern "C" fn text(_: Handle, _: *mut c_char, _: usize) -> c_int {
        0
    }

    unsafe extern "C" fn list(image: Handle, list: *mut SnapInfo, count: *mut c_int) -> c_int {
        let snapshots = &fake(image).snapshots;
        // SAFETY: the caller provides memory for this number of entries.
        unsafe {
            if snapshots.len() >= *count as usize {
                *count = snapshots.len() as c_int + 1;
                return -libc::ERANGE;
            }
            for (at, id) in snapshots.iter().enumerate() {
                *list.add(at) = SnapInfo { id: *id, size: 0, name: c"snap".as_ptr() };
            }
        }
        snapshots.len() as c_int
    }

    unsafe extern "C" fn forget_list(_: *mut SnapInfo) {}

    unsafe extern "C" fn open(
        context: Handle,
        _: *const c_char,
        image: *mut Handle,
        _: *const c_char,
    ) -> c_int {
        // SAFETY: as above.
        unsafe { *image = context.map_addr(|at| at | ASIDE) };
        0
    }

    unsafe extern "C" fn set(image: Handle, snapshot: u64) -> c_int {
        assert!(image.addr() & ASIDE != 0, "the handle that has the lock would lose it");
        fake(image).set_to.set(snapshot);
        0
    }

    /// With an invalid object map, librbd checks each object, omits empty objects, and returns
    /// success.
    unsafe extern "C" fn diff(
        image: Handle,
        _: *const c_char,
        _: u64,
        _: u64,
        _: u8,
        _: u8,
        note: DiffCallback,
        argument: *mut c_void,
    ) -> c_int {
        let mut flags = fake(image).flags.borrow_mut();
        flags.extend(fake(image).damaged.get().map(|snapshot| (snapshot, 2)));
        if flags.values().all(|flags| *flags == 0) {
            // SAFETY: the callback is called like librbd calls it.
            unsafe { note(OBJECT, OBJECT as usize, 0, argument) };
        }
        0
    }

    fn own(wrong: &[(u64, u64)], damaged: Option<u64>) -> Result<OwnMap, String> {
        let library: &'static Library = Box::leak(Box::new(Library {
            rbd_get_overlap: number,
            rbd_get_size: number,
            rbd_get_features: features,
            rbd_get_flags: flags,
            rbd_stat: stat,
            rbd_get_parent: parent,
            rbd_linked_image_spec_cleanup: forget_parent,
            rbd_snap_spec_cleanup: forget_snapshot,
            rados_cluster_fsid: text,
            rbd_get_id: text,
            rbd_snap_list: list,
            rbd_snap_list_end: forget_list,
            rbd_open_by_id_read_only: open,
            rbd_snap_set_by_id: set,
            rbd_diff_iterate2: diff,
            ..library()
        }));
        let fake = Box::leak(Box::new(Fake {
            flags: RefCell::new(wrong.iter().copied().collect()),
            // More snapshots than the first query asks for.
            snapshots: (1..=40).collect(),
            damaged: Cell::new(damaged),
            ..Fake::default()
        }));
        let image = Image::made_up(library, ptr::from_mut(fake).cast());
        let parent = image.parent(&Spec::default()).map_err(|why| why.to_string());
        parent.map(|parent| parent.expect("it has one").own)
    }

    #[test]
    fn a_clone_shares_only_when_all_its_object_maps_are_good() {
        let mut expected = OwnMap::new(OBJECT, OBJECTS * OBJECT);
        expected.take(OBJECT, 1);
        assert_eq!(own(&[], None), Ok(expected));
        let of_itself = own(&[(0, 1)], None).unwrap_err();
        assert!(of_itself.contains("'rbd object-map rebuild IMAGE'"), "{of_itself}");
        // The image's map was rebuilt, and those of the snapshots were not.
        for flags in [1, 2, 3] {
            let of_a_snapshot = own(&[(33, flags)], None).unwrap_err();
            assert!(of_a_snapshot.contains("'rbd object-map rebuild IMAGE@snap'"), "{of_a_snapshot}");
        }
        for damaged in [0, 7] {
            assert!(own(&[], Some(damaged)).is_err(), "{damaged}");
        }
    }
}

/// I/O that ends when the test says so.
mod served {
    use super::*;

    struct Completion {
        argument: *mut c_void,
        result: isize,
    }

    unsafe extern "C" fn create(argument: *mut c_void, _: *mut c_void, completion: *mut Handle) -> c_int {
        let made = Box::new(Completion { argument, result: 0 });
        // SAFETY: the caller provides this memory for the result.
        unsafe { *completion = Box::into_raw(made).cast() };
        0
    }

    unsafe extern "C" fn release(completion: Handle) {
        // SAFETY: the object was created above, and is released once.
        drop(unsafe { Box::from_raw(completion.cast::<Completion>()) });
    }

    unsafe extern "C" fn argument(completion: Handle) -> *mut c_void {
        // SAFETY: the object was created above.
        unsafe { (*completion.cast::<Completion>()).argument }
    }

    unsafe extern "C" fn result(completion: Handle) -> isize {
        // SAFETY: as above.
        unsafe { (*completion.cast::<Completion>()).result }
    }

    fn ask(image: Handle, what: &'static str, completion: Handle) -> c_int {
        fake(image).asked.borrow_mut().push_back((what, completion));
        0
    }

    unsafe extern "C" fn write(
        image: Handle,
        _: u64,
        _: usize,
        _: *const c_char,
        completion: Handle,
    ) -> c_int {
        ask(image, "write", completion)
    }

    unsafe extern "C" fn read(image: Handle, _: u64, _: usize, _: *mut c_char, completion: Handle) -> c_int {
        ask(image, "read", completion)
    }

    unsafe extern "C" fn size(image: Handle, bytes: *mut u64) -> c_int {
        // SAFETY: the caller provides this memory for the result.
        unsafe { *bytes = fake(image).size_bytes.get() };
        0
    }

    unsafe extern "C" fn flush(image: Handle, completion: Handle) -> c_int {
        ask(image, "flush", completion)
    }

    unsafe extern "C" fn poll(image: Handle, completions: *mut Handle, count: c_int) -> c_int {
        let mut ended = fake(image).ended.borrow_mut();
        let count = ended.len().min(count as usize);
        for (at, completion) in ended.drain(..count).enumerate() {
            // SAFETY: the caller provides memory for this number of entries.
            unsafe { *completions.add(at) = completion };
        }
        count as c_int
    }

    struct Bench {
        rbd: Rbd,
        ring: Ring,
        fake: &'static Fake,
        next: u32,
    }

    impl Bench {
        fn new() -> Bench {
            let library: &'static Library = Box::leak(Box::new(Library {
                rbd_aio_create_completion: create,
                rbd_aio_release: release,
                rbd_aio_get_arg: argument,
                rbd_aio_get_return_value: result,
                rbd_aio_read: read,
                rbd_aio_write: write,
                rbd_get_size: size,
                rbd_aio_flush: flush,
                rbd_poll_io_events: poll,
                ..library()
            }));
            let fake = Box::leak(Box::new(Fake { size_bytes: Cell::new(OBJECT), ..Fake::default() }));
            let image = Image::made_up(library, ptr::from_mut(fake).cast());
            image.size_bytes().unwrap();
            let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
            let event = Arc::new(event);
            let info = BackingInfo::simulated(OBJECT, 512);
            let rbd = Rbd {
                info,
                spec: Spec::default(),
                constant: None,
                image: Some(Arc::new(image)),
                maps: Maps::new(event.clone()),
                event,
                attached: None,
                comes_later: false,
                awaits: false,
                closing: false,
                started: HashMap::new(),
                done: VecDeque::new(),
                statuses: VecDeque::new(),
                lock_monitor: LockMonitor { closing: std::sync::mpsc::channel().0, closed: Arc::default() },
            };
            Bench { rbd, ring: Ring::new(&RingConfig::default()).unwrap(), fake, next: 0 }
        }

        fn submit(&mut self, op: IoOp, offset: u64, len: u64) -> IoId {
            self.next += 1;
            let id = IoId(self.next);
            let slice = matches!(op, IoOp::Read | IoOp::Write(_)).then(|| {
                let buffer = self.ring.arena_mut().alloc(len as usize).expect("room");
                BufferSlice { id: buffer, offset: 0, len: len as u32 }
            });
            let io = Io { id, target: Target::Backing(DiskId(0)), op, offset, len, slice };
            self.rbd.submit(&mut self.ring, Instant(0), &io);
            id
        }

        /// Completes the oldest request; returns its kind.
        fn end(&mut self, result: isize) -> &'static str {
            let (what, completion) = self.fake.asked.borrow_mut().pop_front().expect("something was asked");
            // SAFETY: the object was created above, and was not released.
            unsafe { (*completion.cast::<Completion>()).result = result };
            self.fake.ended.borrow_mut().push_back(completion);
            self.rbd.fetch();
            what
        }
    }

    /// The configuration of a pool or an image may have enabled librbd's cache, which acknowledges
    /// data that is only in memory.
    #[test]
    fn a_durable_write_is_flushed_before_it_is_acknowledged() {
        let mut bench = Bench::new();
        let id = bench.submit(IoOp::Write(Durability::Durable), 0, 4096);
        assert_eq!(bench.end(0), "write");
        assert_eq!(bench.rbd.poll_done(), None);
        assert_eq!(bench.end(0), "flush");
        assert_eq!(bench.rbd.poll_done(), Some((id, Ok(()))));
        // Either may fail.
        for results in [[-libc::EIO].as_slice(), &[0, -libc::EIO]] {
            let id = bench.submit(IoOp::Write(Durability::Durable), 0, 4096);
            results.iter().for_each(|result| _ = bench.end(*result as isize));
            assert_eq!(bench.rbd.poll_done(), Some((id, Err(IoError::Failed))), "{results:?}");
        }
        let id = bench.submit(IoOp::Write(Durability::Volatile), 0, 4096);
        assert_eq!(bench.end(0), "write");
        assert_eq!(bench.rbd.poll_done(), Some((id, Ok(()))));
        assert!(bench.rbd.started.is_empty() && bench.fake.asked.borrow().is_empty());
    }

    /// If librbd reads less than was asked for, the read fails: the rest of the buffer may have
    /// data of any disk.
    #[test]
    fn a_short_read_is_none() {
        let mut bench = Bench::new();
        for (read, expected) in [
            (4096, Ok(())),
            (512, Err(IoError::Failed)),
            (0, Err(IoError::Failed)),
            (-22, Err(IoError::Failed)),
        ] {
            let id = bench.submit(IoOp::Read, OBJECT - 4096, 4096);
            assert_eq!(bench.end(read), "read");
            assert_eq!(bench.rbd.poll_done(), Some((id, expected)), "{read} bytes");
        }
    }

    /// After an image has shrunk, librbd writes only the part of a write that fits, and
    /// acknowledges everything.
    #[test]
    fn nothing_is_written_past_the_end_of_an_image_that_was_made_smaller() {
        let mut bench = Bench::new();
        let end = |bench: &mut Bench, size_bytes: u64| {
            bench.fake.size_bytes.set(size_bytes);
            bench.rbd.image.as_ref().unwrap().size_bytes().unwrap();
        };
        end(&mut bench, OBJECT / 2);
        let failed = Err(IoError::Failed);
        for (op, offset, len) in [
            (IoOp::Write(Durability::Volatile), OBJECT / 2 - 512, 1024),
            (IoOp::Write(Durability::Durable), OBJECT - 512, 512),
            (IoOp::WriteZeroes(Zeroing::MayUnmap), 0, OBJECT),
            (IoOp::Discard, OBJECT / 2, 512),
        ] {
            let id = bench.submit(op, offset, len);
            assert_eq!(bench.rbd.poll_done(), Some((id, failed)), "{op:?}");
        }
        bench.submit(IoOp::Write(Durability::Volatile), OBJECT / 2 - 512, 512);
        assert_eq!(bench.end(0), "write");
        bench.submit(IoOp::Flush, 0, 0);
        assert_eq!(bench.end(0), "flush");
        // The image has its size again.
        end(&mut bench, OBJECT);
        bench.submit(IoOp::Write(Durability::Volatile), OBJECT - 512, 512);
        assert_eq!(bench.end(0), "write");
    }
}

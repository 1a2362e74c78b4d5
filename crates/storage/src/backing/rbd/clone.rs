//! Finds out which objects of a clone are its own, and which are its parent's.
//!
//! hob lists the objects when the image is opened, under its lock or from a snapshot, so that no
//! other client changes the image. From then on only this process changes the image, and
//! [`overlay`](crate::backing::overlay) tracks the changes. Another client can still ask to flatten
//! or shrink the image. librbd then flattens or shrinks the image in hob's process, because hob has
//! the lock. The thread of the lock monitor detects the change. A flattened image shares nothing
//! with its parent.
//!
//! The object map (`fast-diff`) lists the existing objects. Without the object map, librbd would
//! check each object, and would skip empty objects that hide the parent's objects. Images without
//! an object map therefore share nothing. librbd reads the maps of all snapshots for the list. If a
//! map is invalid, librbd silently checks each object. So hob checks all maps before and after the
//! listing.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::Ordering;

use super::library::{Handle, ImageInfo, Library, LinkedImageSpec, SnapInfo, SnapSpec};
use super::spec::Spec;
use super::{Image, check};
use crate::backing::{NotShared, OwnMap, Parent};

/// The constant `RBD_FEATURE_STRIPINGV2` of librbd.
const FEATURE_STRIPING: u64 = 1 << 1;
/// The constant `RBD_FEATURE_FAST_DIFF` of librbd.
const FEATURE_FAST_DIFF: u64 = 1 << 4;
/// The flags `RBD_FLAG_OBJECT_MAP_INVALID` and `RBD_FLAG_FAST_DIFF_INVALID` of librbd.
const FLAGS_INVALID: u64 = 3;
/// The constant `RBD_SNAP_NAMESPACE_TYPE_USER` of librbd.
const SNAPSHOT_OF_USER: c_int = 0;

/// A parent image, as librbd names it.
struct Named {
    pool: String,
    namespace: String,
    image: String,
    image_id: String,
    snapshot: String,
    snapshot_id: u64,
}

/// Returns the permanent name of a snapshot.
pub(super) fn constant(cluster: &str, pool: &str, namespace: &str, image_id: &str, snapshot: u64) -> String {
    let place = if namespace.is_empty() { pool.to_owned() } else { format!("{pool}/{namespace}") };
    format!("rbd snapshot {snapshot} of image {image_id} of pool {place} in cluster {cluster}")
}

impl Image {
    /// Returns the image's parent, if hob can serve the parent as a separate disk. Waits for the
    /// cluster. The error has the reason why hob cannot serve the parent in this way.
    pub(super) fn parent(&self, spec: &Spec) -> Result<Option<Parent>, NotShared> {
        let mut common_bytes = 0;
        // SAFETY: the image is open.
        let result = unsafe { (self.library.rbd_get_overlap)(self.image, &mut common_bytes) };
        check("cannot read the overlap with its parent", result).map_err(NotShared::Unknown)?;
        let Some(named) = self.parent_name()?.filter(|_| common_bytes > 0) else { return Ok(None) };
        if !self.locked.load(Ordering::Relaxed) && spec.snapshot.is_none() {
            return Err(NotShared::Unsuitable(
                "other clients may write to it while it is open, so its overlap with the parent may change"
                    .to_owned(),
            ));
        }
        let object_bytes = self.object_bytes()?;
        let mut own = OwnMap::new(object_bytes, common_bytes);
        self.check_maps().map_err(NotShared::Unknown)?;
        self.note_own(&mut own).map_err(NotShared::Unknown)?;
        // librbd marks an object map as invalid when it cannot read the map.
        self.check_maps().map_err(NotShared::Unknown)?;
        self.common_bytes.store(common_bytes, Ordering::Release);
        let (cluster, _) = self.ids().map_err(NotShared::Unknown)?;
        let Named { pool, namespace, image, image_id, snapshot, snapshot_id } = named;
        let constant = constant(&cluster, &pool, &namespace, &image_id, snapshot_id);
        let parent = Spec { pool, namespace, image, snapshot: Some(snapshot), ..spec.clone() };
        let spec = format!("rbd:{parent}");
        Ok(Some(Parent { spec, format: None, files: Vec::new(), constant, own }))
    }

    /// Returns the name of the image's parent; `None` if it has none.
    fn parent_name(&self) -> Result<Option<Named>, NotShared> {
        let mut image = LinkedImageSpec::default();
        let mut snapshot = SnapSpec::default();
        // SAFETY: the image is open. The call writes both variables before they are read, or
        // neither.
        let result = unsafe { (self.library.rbd_get_parent)(self.image, &mut image, &mut snapshot) };
        if result == -libc::ENOENT {
            return Ok(None);
        }
        check("cannot read the name of its parent", result).map_err(NotShared::Unknown)?;
        let named = Named {
            pool: text(image.pool_name),
            namespace: text(image.pool_namespace),
            image: text(image.image_name),
            image_id: text(image.image_id),
            snapshot: text(snapshot.name),
            snapshot_id: snapshot.id,
        };
        let is_reachable = !image.trash && snapshot.namespace_type == SNAPSHOT_OF_USER;
        // SAFETY: librbd has filled the structures, and they are not used any more.
        unsafe {
            (self.library.rbd_linked_image_spec_cleanup)(&mut image);
            (self.library.rbd_snap_spec_cleanup)(&mut snapshot);
        }
        if !is_reachable {
            let why = "its parent was removed, and exists only for its clones";
            return Err(NotShared::Unsuitable(why.to_owned()));
        }
        Ok(Some(named))
    }

    /// Returns the size of the image's objects, which hob uses as the stripe size, bytes. `None`
    /// for striped images, and if librbd does not report the size.
    pub(super) fn stripe_bytes(&self) -> Option<u64> {
        let (mut features, mut info) = (0, ImageInfo::default());
        // SAFETY: the image is open, and the length is that of the structure.
        let is_known = unsafe {
            (self.library.rbd_get_features)(self.image, &mut features) == 0
                && (self.library.rbd_stat)(self.image, &mut info, size_of::<ImageInfo>()) == 0
        };
        (is_known && features & FEATURE_STRIPING == 0).then_some(info.obj_size)
    }

    /// Returns the size of an object, bytes. Fails for striped images.
    fn object_bytes(&self) -> Result<u64, NotShared> {
        let (mut features, mut info) = (0, ImageInfo::default());
        // SAFETY: the image is open, and the length is that of the structure.
        unsafe {
            let result = (self.library.rbd_get_features)(self.image, &mut features);
            check("cannot read the image's features", result).map_err(NotShared::Unknown)?;
            let result = (self.library.rbd_stat)(self.image, &mut info, size_of::<ImageInfo>());
            check("cannot read the image's object size", result).map_err(NotShared::Unknown)?;
        }
        let why = if features & FEATURE_STRIPING != 0 {
            "the image uses custom striping, which hob does not support for clones".to_owned()
        } else if features & FEATURE_FAST_DIFF == 0 {
            "the image has no fast-diff, with which hob finds the blocks of the clone ('rbd feature enable IMAGE object-map fast-diff', then 'rbd object-map rebuild IMAGE')".to_owned()
        } else if !info.obj_size.is_power_of_two() || !(4096..=1 << 30).contains(&info.obj_size) {
            format!("its objects have {} bytes", info.obj_size)
        } else {
            return Ok(info.obj_size);
        };
        Err(NotShared::Unsuitable(why))
    }

    /// Fails unless the object maps of the image and of all its snapshots are valid.
    fn check_maps(&self) -> Result<(), String> {
        if self.library.is_map_invalid(self.image)? {
            return Err("the image's object map is marked invalid ('rbd object-map rebuild IMAGE')".into());
        }
        let snapshots = self.snapshots()?;
        if snapshots.is_empty() {
            return Ok(());
        }
        let aside = Aside::open(self)?;
        for (id, name) in snapshots {
            if aside.is_map_invalid(id)? {
                return Err(format!(
                    "the object map of its snapshot {name} is marked invalid (run 'rbd object-map rebuild IMAGE@{name}'; rebuilding \
                     the object map of IMAGE does not rebuild those of its snapshots)"
                ));
            }
        }
        Ok(())
    }

    /// Returns the ids and names of all snapshots of the image.
    fn snapshots(&self) -> Result<Vec<(u64, String)>, String> {
        let mut room: c_int = 16;
        loop {
            let mut list = vec![SnapInfo::default(); room as usize];
            // SAFETY: the image is open, and the list has room for the given number of entries.
            let count = unsafe { (self.library.rbd_snap_list)(self.image, list.as_mut_ptr(), &mut room) };
            if count == -libc::ERANGE && room as usize > list.len() {
                continue;
            }
            check("cannot list the image's snapshots", count)?;
            let named = list.iter().take(count as usize).map(|one| (one.id, text(one.name))).collect();
            if count > 0 {
                // SAFETY: librbd has created the list, and it is not used any more.
                unsafe { (self.library.rbd_snap_list_end)(list.as_mut_ptr()) };
            }
            return Ok(named);
        }
    }

    /// Marks the objects that are the clone's own.
    fn note_own(&self, own: &mut OwnMap) -> Result<(), String> {
        let size = self.size_bytes()?;
        let map: *mut OwnMap = own;
        // SAFETY: the image is open; `note` is called before this returns, with the address of a
        // map that no other code uses until then.
        let result = unsafe {
            (self.library.rbd_diff_iterate2)(self.image, ptr::null(), 0, size, 0, 1, note, map.cast())
        };
        check("cannot list the image's objects", result)
    }

    /// Updates how much data the image has in common with its parent.
    pub(super) fn look_at_parent(&self) {
        if self.common_bytes.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut common_bytes = 0;
        // SAFETY: the image is open.
        let result = unsafe { (self.library.rbd_get_overlap)(self.image, &mut common_bytes) };
        if result >= 0 {
            self.common_bytes.fetch_min(common_bytes, Ordering::AcqRel);
        }
    }
}

impl Library {
    /// Returns true if an object map is marked invalid. If the handle is set to a snapshot, this is
    /// the object map of the snapshot, otherwise that of the image.
    fn is_map_invalid(&self, image: Handle) -> Result<bool, String> {
        let mut flags = 0;
        // SAFETY: the image is open.
        check("cannot read the flags of an object map", unsafe { (self.rbd_get_flags)(image, &mut flags) })?;
        Ok(flags & FLAGS_INVALID != 0)
    }
}

/// A second handle of the image, for examining its snapshots. A handle that is set to a snapshot
/// would lose the lock.
struct Aside {
    library: &'static Library,
    image: Handle,
}

impl Aside {
    fn open(image: &Image) -> Result<Aside, String> {
        let library = image.library;
        let (_, id) = image.ids()?;
        let id = CString::new(id).map_err(|_| "its id has a NUL")?;
        let mut aside = ptr::null_mut();
        // SAFETY: the context is open, the id outlives the call; the handle is written before it is
        // read.
        let result = unsafe {
            (library.rbd_open_by_id_read_only)(image.context, id.as_ptr(), &mut aside, ptr::null())
        };
        check("cannot open the image a second time", result)?;
        Ok(Aside { library, image: aside })
    }

    /// Returns true if the object map of a snapshot is marked invalid or cannot be read.
    fn is_map_invalid(&self, snapshot: u64) -> Result<bool, String> {
        // SAFETY: the image is open.
        check("cannot select a snapshot", unsafe {
            (self.library.rbd_snap_set_by_id)(self.image, snapshot)
        })?;
        self.library.is_map_invalid(self.image)
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        // SAFETY: the image was opened, and is not used any more.
        unsafe { (self.library.rbd_close)(self.image) };
    }
}

/// Callback of librbd for one range. Zeroed ranges also belong to the clone itself.
unsafe extern "C" fn note(offset: u64, len: usize, _exists: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: the argument is that of `note_own`.
    let map = unsafe { &mut *argument.cast::<OwnMap>() };
    map.take(offset, len as u64);
    0
}

fn text(at: *const c_char) -> String {
    if at.is_null() {
        return String::new();
    }
    // SAFETY: librbd has stored a string there, which still exists.
    unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
}

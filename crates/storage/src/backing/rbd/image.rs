//! An open RBD image, and its calls that wait for the cluster.
#![allow(unsafe_code)]

use std::ffi::{CString, c_char, c_int};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hob_engine::io::IoError;

use super::clone;
use super::library::{FEATURE_EXCLUSIVE_LOCK, Handle, LOCK_MODE_EXCLUSIVE, Library};
use super::spec::Spec;
use crate::backing::Reader;
use crate::backing::size_probe::Measured;

/// Error code of librados with several meanings; one is that no monitor is configured.
const NOT_FOUND: c_int = -libc::ENOENT;

/// An open RBD image and its connection to the cluster. Any thread may call its methods.
pub(super) struct Image {
    pub(super) library: &'static Library,
    cluster: Handle,
    pub(super) context: Handle,
    pub(super) image: Handle,
    pub(super) locked: AtomicBool,
    /// Whether another client has broken the lock.
    pub(super) lost: AtomicBool,
    /// Size of the image when it was last read, bytes.
    pub(super) size_bytes: AtomicU64,
    /// Length that the image has in common with its parent, bytes; 0 until it is read.
    pub(super) common_bytes: AtomicU64,
}

// SAFETY: librados and librbd allow calls on one handle from any number of threads.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: each handle is null, or was created by the call that belongs to this release, and
        // is not used any more. No I/O is in flight: the driver that started it has seen it end.
        unsafe {
            if !self.image.is_null() {
                if self.locked.load(Ordering::Relaxed) {
                    (self.library.rbd_lock_release)(self.image);
                }
                (self.library.rbd_close)(self.image);
            }
            if !self.context.is_null() {
                (self.library.rados_ioctx_destroy)(self.context);
            }
            if !self.cluster.is_null() {
                (self.library.rados_shutdown)(self.cluster);
            }
        }
    }
}

fn string(text: &str) -> CString {
    CString::new(text).expect("specifications have no NUL")
}

/// Returns an error text that begins with `what` if a result of librados or librbd is an error.
pub(super) fn check(what: &str, result: c_int) -> Result<(), String> {
    match result {
        0.. => Ok(()),
        errno => Err(format!("{what}: {}", std::io::Error::from_raw_os_error(-errno))),
    }
}

impl Image {
    /// Connects to the cluster and opens the image. Takes slightly longer than `patience` at most.
    pub(super) fn open(
        library: &'static Library,
        spec: &Spec,
        write: bool,
        patience: Duration,
    ) -> Result<Image, String> {
        let (locked, lost) = (AtomicBool::new(false), AtomicBool::new(false));
        let null = ptr::null_mut();
        let (size_bytes, common_bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let mut image = Image {
            library,
            cluster: null,
            context: null,
            image: null,
            locked,
            lost,
            size_bytes,
            common_bytes,
        };
        image.connect(spec, patience)?;
        let (pool, name) = (string(&spec.pool), string(&spec.image));
        let snapshot = spec.snapshot.as_deref().map(string);
        let snapshot = snapshot.as_ref().map_or(ptr::null(), |name| name.as_ptr());
        // SAFETY: the cluster is connected, all strings outlive the calls, and the handles are
        // written before they are read.
        unsafe {
            let result = (library.rados_ioctx_create)(image.cluster, pool.as_ptr(), &mut image.context);
            check(&format!("cannot open pool {}", spec.pool), result)?;
            if !spec.namespace.is_empty() {
                (library.rados_ioctx_set_namespace)(image.context, string(&spec.namespace).as_ptr());
            }
            let open = if write { library.rbd_open } else { library.rbd_open_read_only };
            let result = open(image.context, name.as_ptr(), &mut image.image, snapshot);
            check(&format!("cannot open image {}", spec.name()), result)?;
        }
        Ok(image)
    }

    fn connect(&mut self, spec: &Spec, patience: Duration) -> Result<(), String> {
        let library = self.library;
        let user = string(&format!("client.{}", spec.user.as_deref().unwrap_or("admin")));
        let mut is_configured = true;
        // SAFETY: the strings outlive the calls; the handle is written before it is read.
        unsafe {
            let result = (library.rados_create2)(&mut self.cluster, c"ceph".as_ptr(), user.as_ptr(), 0);
            check("cannot create a librados client", result)?;
            let conf = spec.conf.as_deref().map(string);
            let result = (library.rados_conf_read_file)(
                self.cluster,
                conf.as_ref().map_or(ptr::null(), |path| path.as_ptr()),
            );
            if conf.is_some() || result != -libc::ENOENT {
                check(spec.conf.as_deref().unwrap_or("ceph.conf"), result)?;
            } else {
                // The options alone may be sufficient.
                is_configured = false;
            }
            (library.rados_conf_parse_env)(self.cluster, ptr::null());
        }
        let seconds = patience.as_secs().max(1).to_string();
        let ours = [("client_mount_timeout", seconds.as_str()), ("rbd_cache", "false")];
        let given = spec.options.iter().map(|(option, value)| (option.as_str(), value.as_str()));
        for (option, value) in ours.into_iter().chain(given) {
            // SAFETY: as above.
            let result = unsafe {
                (library.rados_conf_set)(self.cluster, string(option).as_ptr(), string(value).as_ptr())
            };
            check(&format!("cannot set option {option}={value}"), result)?;
        }
        // SAFETY: the cluster's handle is configured.
        match unsafe { (library.rados_connect)(self.cluster) } {
            NOT_FOUND if !is_configured => {
                Err("/etc/ceph/ceph.conf does not exist; name the cluster's configuration with :conf=PATH"
                    .into())
            }
            result => check("cannot reach the cluster", result),
        }
    }

    /// Returns the present size of the image, bytes. Waits for the cluster if the size has changed.
    pub(super) fn size_bytes(&self) -> Result<u64, String> {
        let before = self.size_bytes.load(Ordering::Relaxed);
        let mut bytes = 0;
        // SAFETY: the image is open.
        check("cannot read the image's size", unsafe {
            (self.library.rbd_get_size)(self.image, &mut bytes)
        })?;
        // If another thread has asked for the size at the same time, it is unknown which answer is
        // newer. The next answer is certainly newer.
        let _ = self.size_bytes.compare_exchange(before, bytes, Ordering::Relaxed, Ordering::Relaxed);
        Ok(bytes)
    }

    pub(super) fn ids(&self) -> Result<(String, String), String> {
        let (mut cluster, mut id) = ([0u8; 64], [0u8; 256]);
        // SAFETY: the handles are open, and the lengths are those of the arrays, which are zeroed.
        unsafe {
            let text = cluster.as_mut_ptr().cast::<c_char>();
            check(
                "cannot read the cluster's id",
                (self.library.rados_cluster_fsid)(self.cluster, text, cluster.len() - 1),
            )?;
            let text = id.as_mut_ptr().cast::<c_char>();
            check("cannot read the image's id", (self.library.rbd_get_id)(self.image, text, id.len() - 1))?;
        }
        let text = |bytes: &[u8]| {
            String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
        };
        Ok((text(&cluster), text(&id)))
    }

    /// Returns the identity text of the image, and for a snapshot also the name that
    /// [`Driver::constant`] returns.
    pub(super) fn identity(&self, spec: &Spec, size_bytes: u64) -> Result<(String, Option<String>), String> {
        let (cluster, id) = self.ids()?;
        let Some(name) = &spec.snapshot else {
            let text =
                format!("rbd image {id} of pool {} in cluster {cluster}, {size_bytes} bytes", spec.pool);
            return Ok((text, None));
        };
        let mut number = 0;
        // SAFETY: the image is open; the name outlives the call.
        let result =
            unsafe { (self.library.rbd_snap_get_id)(self.image, string(name).as_ptr(), &mut number) };
        check("cannot read the snapshot's id", result)?;
        // The same name may later belong to another snapshot.
        let constant = clone::constant(&cluster, &spec.pool, &spec.namespace, &id, number);
        Ok((format!("{constant}, {size_bytes} bytes"), Some(constant)))
    }

    /// Creates an image of a fake library, for tests.
    #[cfg(test)]
    pub(super) fn made_up(library: &'static Library, handle: Handle) -> Image {
        let (locked, lost) = (AtomicBool::new(true), AtomicBool::new(false));
        let (size_bytes, common_bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let (cluster, context, image) = (handle, handle, handle);
        Image { library, cluster, context, image, locked, lost, size_bytes, common_bytes }
    }

    /// Locks the image against other writers. Returns false if the image has no exclusive-lock
    /// feature.
    pub(super) fn lock(&self) -> Result<bool, c_int> {
        let mut features = 0;
        // SAFETY: the image is open.
        let result = unsafe { (self.library.rbd_get_features)(self.image, &mut features) };
        if result < 0 {
            return Err(result);
        }
        if features & FEATURE_EXCLUSIVE_LOCK == 0 {
            return Ok(false);
        }
        // SAFETY: as above.
        match unsafe { (self.library.rbd_lock_acquire)(self.image, LOCK_MODE_EXCLUSIVE) } {
            0.. => {
                self.locked.store(true, Ordering::Relaxed);
                Ok(true)
            }
            error => Err(error),
        }
    }

    /// Releases the image's lock.
    pub(super) fn unlock(&self) -> c_int {
        // SAFETY: the image is open.
        unsafe { (self.library.rbd_lock_release)(self.image) }
    }

    /// Returns true if this client has the lock. Waits for the cluster.
    pub(super) fn holds_lock(&self) -> bool {
        let mut is_owner = 0;
        // SAFETY: the image is open.
        let result = unsafe { (self.library.rbd_is_exclusive_lock_owner)(self.image, &mut is_owner) };
        is_owner != 0 || result < 0 && result != -libc::ESHUTDOWN
    }

    pub(super) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        // SAFETY: the image is open; the caller lends the bytes for the call.
        let read =
            unsafe { (self.library.rbd_read)(self.image, offset, bytes.len(), bytes.as_mut_ptr().cast()) };
        if read == bytes.len() as isize { Ok(()) } else { Err(IoError::Failed) }
    }
}

impl Measured for Image {
    fn size_bytes(&self) -> std::io::Result<u64> {
        Image::size_bytes(self).map_err(std::io::Error::other)
    }
}

impl Reader for Arc<Image> {
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), IoError> {
        Image::read(self, offset, bytes)
    }
}

//! The functions of librados and librbd that hob uses, loaded when the first image is opened.
//!
//! The libraries are loaded at run time, not linked. hob builds and runs without Ceph, and reports
//! missing libraries when an image is opened. The declarations follow `librados.h` and `librbd.h`
//! of Ceph 16, which later versions keep.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

/// The types `rados_t`, `rados_ioctx_t`, `rbd_image_t` and `rbd_completion_t`: opaque pointers.
pub(super) type Handle = *mut c_void;

/// Callback for each range that was or was not written.
pub(super) type DiffCallback =
    unsafe extern "C" fn(offset: u64, len: usize, exists: c_int, argument: *mut c_void) -> c_int;

/// The constant `EVENT_TYPE_EVENTFD` of librbd.
pub(super) const EVENT_TYPE_EVENTFD: c_int = 2;
/// The constant `RBD_LOCK_MODE_EXCLUSIVE` of librbd.
pub(super) const LOCK_MODE_EXCLUSIVE: c_int = 0;
/// The constant `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION` of librbd.
pub(super) const ZEROES_THICK: c_int = 1;
/// The constant `RBD_FEATURE_EXCLUSIVE_LOCK` of librbd.
pub(super) const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;

/// The structure `rbd_linked_image_spec_t` of librbd.
#[repr(C)]
#[derive(Debug)]
pub(super) struct LinkedImageSpec {
    pub(super) pool_id: i64,
    pub(super) pool_name: *mut c_char,
    pub(super) pool_namespace: *mut c_char,
    pub(super) image_id: *mut c_char,
    pub(super) image_name: *mut c_char,
    pub(super) trash: bool,
}

impl Default for LinkedImageSpec {
    fn default() -> Self {
        let none = std::ptr::null_mut();
        LinkedImageSpec {
            pool_id: 0,
            pool_name: none,
            pool_namespace: none,
            image_id: none,
            image_name: none,
            trash: false,
        }
    }
}

/// The structure `rbd_snap_spec_t` of librbd.
#[repr(C)]
#[derive(Debug)]
pub(super) struct SnapSpec {
    pub(super) id: u64,
    pub(super) namespace_type: c_int,
    pub(super) name: *mut c_char,
}

impl Default for SnapSpec {
    fn default() -> Self {
        SnapSpec { id: 0, namespace_type: 0, name: std::ptr::null_mut() }
    }
}

/// The structure `rbd_snap_info_t` of librbd.
#[repr(C)]
#[derive(Clone, Debug)]
pub(super) struct SnapInfo {
    pub(super) id: u64,
    pub(super) size: u64,
    pub(super) name: *const c_char,
}

impl Default for SnapInfo {
    fn default() -> Self {
        SnapInfo { id: 0, size: 0, name: std::ptr::null() }
    }
}

/// The structure `rbd_image_info_t` of librbd.
#[repr(C)]
#[derive(Debug)]
pub(super) struct ImageInfo {
    size: u64,
    pub(super) obj_size: u64,
    num_objs: u64,
    order: c_int,
    block_name_prefix: [c_char; 24],
    parent_pool: i64,
    parent_name: [c_char; 96],
}

impl Default for ImageInfo {
    fn default() -> Self {
        let (block_name_prefix, parent_name) = ([0; 24], [0; 96]);
        ImageInfo {
            size: 0,
            obj_size: 0,
            num_objs: 0,
            order: 0,
            block_name_prefix,
            parent_pool: 0,
            parent_name,
        }
    }
}

macro_rules! library {
    ($($name:ident: fn($($argument:ident: $type:ty),*) -> $result:ty,)*) => {
        /// Functions of the libraries, under their own names.
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument: $type),*) -> $result,)*
        }

        impl Library {
            fn load() -> Result<Library, String> {
                let handles = [open(c"librbd.so.1")?, open(c"librados.so.2")?];
                Ok(Library {
                    $($name: {
                        let name = CString::new(stringify!($name)).expect("no NUL in a name");
                        let address = symbol(&handles, &name)?;
                        // SAFETY: the library's header declares the function of that name with this
                        // type.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> $result>(address) }
                    },)*
                })
            }

            /// Creates a library whose functions do nothing. Tests replace some of them.
            #[cfg(test)]
            pub(super) fn made_up() -> Library {
                $(unsafe extern "C" fn $name($(_: $type),*) -> $result {
                    unimplemented!(stringify!($name))
                })*
                Library { $($name,)* }
            }
        }
    };
}

library! {
    rados_create2: fn(cluster: *mut Handle, name: *const c_char, user: *const c_char, flags: u64) -> c_int,
    rados_conf_read_file: fn(cluster: Handle, path: *const c_char) -> c_int,
    rados_conf_parse_env: fn(cluster: Handle, variable: *const c_char) -> c_int,
    rados_conf_set: fn(cluster: Handle, option: *const c_char, value: *const c_char) -> c_int,
    rados_connect: fn(cluster: Handle) -> c_int,
    rados_shutdown: fn(cluster: Handle) -> (),
    rados_cluster_fsid: fn(cluster: Handle, text: *mut c_char, len: usize) -> c_int,
    rados_ioctx_create: fn(cluster: Handle, pool: *const c_char, context: *mut Handle) -> c_int,
    rados_ioctx_set_namespace: fn(context: Handle, namespace: *const c_char) -> (),
    rados_ioctx_destroy: fn(context: Handle) -> (),
    rbd_open: fn(context: Handle, name: *const c_char, image: *mut Handle, snap: *const c_char) -> c_int,
    rbd_open_read_only: fn(context: Handle, name: *const c_char, image: *mut Handle, snap: *const c_char) -> c_int,
    rbd_open_by_id_read_only: fn(context: Handle, id: *const c_char, image: *mut Handle, snap: *const c_char) -> c_int,
    rbd_close: fn(image: Handle) -> c_int,
    rbd_get_size: fn(image: Handle, bytes: *mut u64) -> c_int,
    rbd_get_id: fn(image: Handle, text: *mut c_char, len: usize) -> c_int,
    rbd_stat: fn(image: Handle, info: *mut ImageInfo, len: usize) -> c_int,
    rbd_get_flags: fn(image: Handle, flags: *mut u64) -> c_int,
    rbd_get_overlap: fn(image: Handle, bytes: *mut u64) -> c_int,
    rbd_get_parent: fn(image: Handle, parent: *mut LinkedImageSpec, snap: *mut SnapSpec) -> c_int,
    rbd_linked_image_spec_cleanup: fn(parent: *mut LinkedImageSpec) -> (),
    rbd_snap_spec_cleanup: fn(snap: *mut SnapSpec) -> (),
    rbd_snap_list: fn(image: Handle, snaps: *mut SnapInfo, count: *mut c_int) -> c_int,
    rbd_snap_list_end: fn(snaps: *mut SnapInfo) -> (),
    rbd_snap_set_by_id: fn(image: Handle, id: u64) -> c_int,
    rbd_snap_get_id: fn(image: Handle, name: *const c_char, id: *mut u64) -> c_int,
    rbd_get_features: fn(image: Handle, features: *mut u64) -> c_int,
    rbd_set_image_notification: fn(image: Handle, fd: c_int, kind: c_int) -> c_int,
    rbd_poll_io_events: fn(image: Handle, completions: *mut Handle, count: c_int) -> c_int,
    rbd_lock_acquire: fn(image: Handle, mode: c_int) -> c_int,
    rbd_lock_release: fn(image: Handle) -> c_int,
    rbd_is_exclusive_lock_owner: fn(image: Handle, is_owner: *mut c_int) -> c_int,
    rbd_diff_iterate2: fn(image: Handle, from: *const c_char, offset: u64, len: u64, parent: u8, whole_object: u8, callback: DiffCallback, argument: *mut c_void) -> c_int,
    rbd_read: fn(image: Handle, offset: u64, len: usize, bytes: *mut c_char) -> isize,
    rbd_aio_create_completion: fn(argument: *mut c_void, callback: *mut c_void, completion: *mut Handle) -> c_int,
    rbd_aio_release: fn(completion: Handle) -> (),
    rbd_aio_get_return_value: fn(completion: Handle) -> isize,
    rbd_aio_get_arg: fn(completion: Handle) -> *mut c_void,
    rbd_aio_read: fn(image: Handle, offset: u64, len: usize, bytes: *mut c_char, completion: Handle) -> c_int,
    rbd_aio_write: fn(image: Handle, offset: u64, len: usize, bytes: *const c_char, completion: Handle) -> c_int,
    rbd_aio_discard: fn(image: Handle, offset: u64, len: u64, completion: Handle) -> c_int,
    rbd_aio_write_zeroes: fn(image: Handle, offset: u64, len: usize, completion: Handle, flags: c_int, op_flags: c_int) -> c_int,
    rbd_aio_flush: fn(image: Handle, completion: Handle) -> c_int,
}

impl Library {
    /// Returns the loaded libraries, or why they cannot be loaded. The libraries stay loaded until
    /// the process ends.
    pub(super) fn get() -> Result<&'static Library, String> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        LIBRARY.get_or_init(Library::load).as_ref().map_err(Clone::clone)
    }
}

fn open(name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: `name` is a string. The library's initialisers are those of the distribution's
    // package.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() { Err(complaint()) } else { Ok(handle) }
}

fn symbol(handles: &[*mut c_void], name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: the handles belong to loaded libraries, and `name` is a string.
    let found = handles.iter().map(|handle| unsafe { libc::dlsym(*handle, name.as_ptr()) });
    found.into_iter().find(|address| !address.is_null()).ok_or_else(complaint)
}

fn complaint() -> String {
    // SAFETY: `dlerror` returns null, or a string that is valid until this thread calls a dl
    // function again.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the dynamic loader gave no reason".to_owned();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

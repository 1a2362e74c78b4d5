//! NBD exports as backings (stub).
use super::*;
pub(super) fn recognise(spec: &str) -> bool { spec.starts_with("nbd") }
pub(super) fn open(_s: &str, _a: Access, _o: &BackingOptions) -> Result<Box<dyn Driver>, OpenError> { todo!() }

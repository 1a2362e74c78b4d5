//! stub
use super::*;
pub(super) fn recognise(_spec: &str) -> bool { false }
pub(super) fn open(_s: &str, _a: Access, _o: &BackingOptions) -> Result<Box<dyn Driver>, OpenError> { todo!() }

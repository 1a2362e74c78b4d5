//! Changes of hob.toml that a reload did not make: they need an operator, failed, or wait for
//! guests or for another operation.

use hob_control::{ConfigDifference, ConfigRemedy};

/// A change of hob.toml that is not in effect.
#[derive(Clone, Debug)]
pub(in crate::services) struct PendingChange {
    /// The difference between hob.toml and the running daemon that the change would resolve.
    pub(in crate::services) difference: ConfigDifference,
    /// Error of the last attempt; `None` without an attempt.
    pub(in crate::services) failure: Option<String>,
    /// True if the last attempt failed while the object to be changed was offline, or while another
    /// operation on the object was in progress. hob tries again when the object is available.
    pub(in crate::services) is_delayed: bool,
}

impl PendingChange {
    /// Returns true if this is the change that resolves `other`.
    pub(in crate::services) fn is_same(&self, other: &ConfigDifference) -> bool {
        let of =
            |it: &ConfigDifference| (it.subject.clone(), it.key.clone(), it.file.clone(), it.running.clone());
        of(&self.difference) == of(other)
    }

    /// Returns true if hob makes the change when guests have had time to connect after the start.
    pub(in crate::services) fn waits_for_guests(&self) -> bool {
        self.failure.is_none() && self.difference.by == ConfigRemedy::Apply
    }

    /// Returns the change, the reason why it is not in effect, and the remedy.
    pub(in crate::services) fn reason(&self) -> String {
        let (what, action) = (self.difference.what(), &self.difference.action);
        match (&self.failure, self.difference.by) {
            (Some(why), _) if self.is_delayed => {
                let subject = &self.difference.subject;
                format!("{what}: not applied: {why}; hob tries again by itself when {subject} is available")
            }
            (Some(why), _) => {
                format!("{what}: not applied: {why}; remove the cause, then run 'hob config apply'")
            }
            (None, ConfigRemedy::ApplyWithYes) => {
                format!("{what}: {action}; 'hob config apply --yes' makes this change")
            }
            (None, ConfigRemedy::Apply) => {
                format!("{what}: {action}; hob makes this change when guests have had time to connect again")
            }
            (None, ConfigRemedy::Reload | ConfigRemedy::Command) => {
                format!("{what}: not applied: {action}")
            }
        }
    }
}

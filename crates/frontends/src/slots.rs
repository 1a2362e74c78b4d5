//! The commands in flight of one connection or device, by slot. The slot is part of the id of the
//! engine's requests.

/// Values by slot. A free slot is used again.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    slots: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Slots { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slots<T> {
    /// Returns the number of commands in flight.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn insert(&mut self, command: T) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[slot as usize] = Some(command);
        slot
    }

    pub(crate) fn get(&self, slot: u32) -> &T {
        self.slots[slot as usize].as_ref().expect("a command in flight")
    }

    pub(crate) fn get_mut(&mut self, slot: u32) -> &mut T {
        self.slots[slot as usize].as_mut().expect("an answer to a command in flight")
    }

    pub(crate) fn remove(&mut self, slot: u32) -> T {
        let command = self.slots[slot as usize].take().expect("a command is answered once");
        self.free.push(slot);
        command
    }
}

//! Tokens: how a completion finds back to whoever asked for the operation.
//!
//! | bits | part | meaning |
//! |---|---|---|
//! | 63…48 | kind | who handles it: see [`Token::BACKING`], [`Token::FLASH`] and [`Token::CALLER`] |
//! | 47…32 | owner | which one of that kind: a backing's slot on the shard, a connection … |
//! | 31…0 | index | whatever the owner wants |
//!
//! A shard loop dispatches on the kind, then on the owner; the owner alone understands the index.

/// A name for one operation in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

impl Token {
    /// Kind of the tokens of [`crate::backing::Backing`].
    pub const BACKING: u16 = 1;
    /// Kind of the tokens of [`crate::flash::Flash`].
    pub const FLASH: u16 = 2;
    /// First kind of the tokens of a backing's peers, see [`crate::backing::Backing::handover`].
    pub const PEER: u16 = 3;
    /// The last of these.
    pub const PEER_LAST: u16 = 10;
    /// Kind of the tokens of [`crate::flash::Flash`]'s devices on other hosts; the owner is the device.
    pub const FLASH_REMOTE: u16 = 11;
    /// First kind that the ring's user may give a meaning to; smaller ones are storage's own.
    pub const CALLER: u16 = 16;

    /// Puts a token together.
    pub const fn new(kind: u16, owner: u16, index: u32) -> Token {
        Token((kind as u64) << 48 | (owner as u64) << 32 | index as u64)
    }

    /// Who handles it.
    pub const fn kind(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// Which one of the kind.
    pub const fn owner(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// The owner's own number.
    pub const fn index(self) -> u32 {
        self.0 as u32
    }
}

/// The tokens that one owner may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSpace {
    kind: u16,
    owner: u16,
}

impl TokenSpace {
    /// All tokens of `owner`, which is one of `kind`.
    pub const fn new(kind: u16, owner: u16) -> TokenSpace {
        TokenSpace { kind, owner }
    }

    /// Those of the same owner that are of another kind.
    pub const fn of_kind(self, kind: u16) -> TokenSpace {
        TokenSpace { kind, ..self }
    }

    /// One of them.
    pub const fn token(self, index: u32) -> Token {
        Token::new(self.kind, self.owner, index)
    }

    /// Is it one of them?
    pub const fn contains(self, token: Token) -> bool {
        token.kind() == self.kind && token.owner() == self.owner
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_come_back() {
        let token = Token::new(Token::CALLER, 0xABCD, 0xFFFF_FFFE);
        assert_eq!((token.kind(), token.owner(), token.index()), (16, 0xABCD, 0xFFFF_FFFE));
        assert!(TokenSpace::new(16, 0xABCD).contains(token));
        assert!(!TokenSpace::new(16, 0xABCC).contains(token));
        assert!(!TokenSpace::new(1, 0xABCD).contains(token));
    }
}

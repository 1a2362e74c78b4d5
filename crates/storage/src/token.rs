//! Tokens route a completion to the owner of its operation.
//!
//! | bits | part | meaning |
//! |---|---|---|
//! | 63…48 | kind | the handler: see [`Token::BACKING`], [`Token::FLASH`] and [`Token::CALLER`] |
//! | 47…32 | owner | which one of that kind: a backing's slot on the shard, a connection … |
//! | 31…0 | index | the owner's choice |
//!
//! A shard loop dispatches on the kind, then on the owner. Only the owner interprets the index.

/// Identifies one operation in the I/O ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

impl Token {
    /// Kind of the tokens of [`crate::backing::Backing`].
    pub const BACKING: u16 = 1;
    /// Kind of the tokens of [`crate::flash::Flash`].
    pub const FLASH: u16 = 2;
    /// First kind of the tokens of I/O to a peer, which is the other host of a migrating disk. See
    /// [`crate::backing::Backing::handover`]. Each connection to a peer takes a kind that no other
    /// connection of the same backing uses, from this one to [`Token::PEER_LAST`].
    pub const PEER: u16 = 3;
    /// Last kind of the tokens of I/O to a peer.
    pub const PEER_LAST: u16 = 10;
    /// Kind of the tokens of [`crate::flash::Flash`]'s devices on other hosts. The owner part of
    /// the token is the device's id.
    pub const FLASH_REMOTE: u16 = 11;
    /// First token kind for the user of the I/O ring. This crate uses lower kinds.
    pub const CALLER: u16 = 16;

    /// Creates a token from its three parts.
    pub const fn new(kind: u16, owner: u16, index: u32) -> Token {
        Token((kind as u64) << 48 | (owner as u64) << 32 | index as u64)
    }

    /// Returns the kind: which handler of the shard loop gets the completion.
    pub const fn kind(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// Returns the owner: the object, of the token's kind, that gets the completion.
    pub const fn owner(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// Returns the index: a number that only the token's owner interprets, for example the number
    /// of its operation.
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
    /// Returns the token space of `owner`, an owner of kind `kind`.
    pub const fn new(kind: u16, owner: u16) -> TokenSpace {
        TokenSpace { kind, owner }
    }

    /// Returns the tokens of the same owner with another kind.
    pub const fn of_kind(self, kind: u16) -> TokenSpace {
        TokenSpace { kind, ..self }
    }

    /// Returns the token with this index.
    pub const fn token(self, index: u32) -> Token {
        Token::new(self.kind, self.owner, index)
    }

    /// Returns true if the token belongs to this token space.
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

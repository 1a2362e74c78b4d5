//! API handlers for the host's swap areas.

use hob_control::{Swap, SwapChanged, SwapCreate, SwapPatch};

use super::endpoints::endpoints;

endpoints! { services;
    /// Returns all swap areas with the kernel's state.
    get "/v1/swap"
    swaps() -> Vec<Swap>, "5XX" {
        services.swap.all().await
    }

    /// Creates a swap area in a pool and turns it on. A long operation continues after the
    /// response.
    post "/v1/swap"
    swap_create(; create: SwapCreate) -> SwapChanged, "4XX", "5XX" {
        services.swap.create(create).await
    }

    /// Returns a swap area.
    get "/v1/swap/{swap}"
    swap(swap = "swap": "Its name") -> Swap, 404 {
        services.swap.one(&swap).await
    }

    /// Turns a swap area on or off, or cancels the opposite change. A long operation continues
    /// after the response.
    patch "/v1/swap/{swap}"
    swap_set(swap = "swap": "Its name"; patch: SwapPatch) -> SwapChanged, "4XX", "5XX" {
        services.swap.set(swap, patch).await
    }

    /// Removes a swap area that is off, and returns its space to the pool.
    delete "/v1/swap/{swap}"
    swap_remove(swap = "swap": "Its name") -> SwapChanged, "4XX", "5XX" {
        services.pools.swap_remove(swap).await
    }
}

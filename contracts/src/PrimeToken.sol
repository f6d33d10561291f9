// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { ERC20 } from "@openzeppelin/contracts/token/ERC20/ERC20.sol";
import { ERC20Burnable } from "@openzeppelin/contracts/token/ERC20/extensions/ERC20Burnable.sol";
import { ERC20Permit } from "@openzeppelin/contracts/token/ERC20/extensions/ERC20Permit.sol";

import { Errors } from "./libraries/Errors.sol";

/// @title The network's token: stake, rewards and deposits are counted in it.
/// @notice Plain ERC-20 of 18 decimals with EIP-2612 permits. Only the faucet mints after deployment;
/// it exists on test networks only.
contract PrimeToken is ERC20, ERC20Burnable, ERC20Permit {
    /// @notice What one call of the faucet gives.
    uint256 public constant FAUCET_AMOUNT = 10_000e18;

    /// @notice Whether this is a test network's token.
    bool public immutable testnet;

    /// @param testnet_ Whether the faucet is open.
    /// @param initialHolder Receives the initial supply.
    /// @param initialSupply In units of 1e-18.
    constructor(bool testnet_, address initialHolder, uint256 initialSupply)
        ERC20("Prime", "PRIME")
        ERC20Permit("Prime")
    {
        testnet = testnet_;
        _mint(initialHolder, initialSupply);
    }

    /// @notice Gives the caller play money. Reverts off test networks.
    function faucet() external {
        if (!testnet) revert Errors.NoFaucet();
        _mint(msg.sender, FAUCET_AMOUNT);
    }
}

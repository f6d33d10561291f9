// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { EIP712 } from "@openzeppelin/contracts/utils/cryptography/EIP712.sol";

import { Pools } from "./Pools.sol";
import { StakeVault } from "./StakeVault.sol";
import { Errors } from "./libraries/Errors.sol";
import { Invite, NodeConsent, Statements } from "./libraries/Statements.sol";

/// @title Who owns which node, and where a provider's money goes.
/// @notice Holds no tokens. A provider is a cold account; a node is one machine with a key of its
/// own, bound to its provider by both sides: the provider's transaction, the node's signature.
contract Registry is EIP712 {
    /// @notice A provider registered itself.
    event ProviderRegistered(address indexed provider, address payout);
    /// @notice A provider changed where its rewards go.
    event PayoutChanged(address indexed provider, address payout);
    /// @notice A node was bound to its provider.
    event NodeAdded(address indexed provider, address indexed node);
    /// @notice A provider removed a node.
    event NodeRemoved(address indexed provider, address indexed node);
    /// @notice A provider moved a node to a new key; its history goes on under `to`.
    event NodeMoved(address indexed provider, address indexed from, address indexed to);
    /// @notice The other contracts' addresses were set, for good.
    event RegistryWired(address vault, address pools);
    /// @notice Sessions of `node` that were granted before `at` are void.
    event RevokedBefore(address indexed node, uint64 at);

    /// @notice Provider of a node, zero if it has none.
    mapping(address node => address) public providerOf;
    /// @notice Where a provider's rewards go, zero if it is not registered.
    mapping(address provider => address) public payoutOf;
    /// @notice Sessions granted before this time are void.
    mapping(address node => uint64) public revokedBefore;
    /// @notice Whether a node's consent with this salt was used.
    mapping(address node => mapping(bytes32 salt => bool)) public consentUsed;

    /// @notice The key to which a node was moved last, zero if it was not.
    mapping(address node => address) public movedTo;

    /// @notice Set once by the deployer; used by `enroll` only.
    StakeVault public vault;
    /// @notice Set once by the deployer; used by `enroll` and `moveNode`.
    Pools public pools;
    address private immutable _deployer = msg.sender;

    constructor() EIP712("Prime", "1") { }

    /// @notice Sets the addresses of the contracts deployed later. Once, by the deployer.
    /// @param vault_ The stake vault.
    /// @param pools_ The pools.
    function wire(StakeVault vault_, Pools pools_) external {
        if (msg.sender != _deployer) revert Errors.NotAllowed(msg.sender);
        if (address(vault) != address(0)) revert Errors.AlreadyWired();
        if (address(vault_) == address(0) || address(pools_) == address(0)) {
            revert Errors.ZeroAddress();
        }
        vault = vault_;
        pools = pools_;
        emit RegistryWired(address(vault_), address(pools_));
    }

    /// @notice Makes the caller a provider.
    /// @param payout Where its rewards go.
    function registerProvider(address payout) external {
        if (payoutOf[msg.sender] != address(0)) revert Errors.AlreadyProvider(msg.sender);
        _registerProvider(payout);
    }

    /// @notice Changes where the caller's rewards go.
    /// @param payout The new account.
    function setPayout(address payout) external {
        if (payoutOf[msg.sender] == address(0)) revert Errors.NotProvider(msg.sender);
        if (payout == address(0)) revert Errors.ZeroAddress();
        payoutOf[msg.sender] = payout;
        emit PayoutChanged(msg.sender, payout);
    }

    /// @notice Binds a node to the caller.
    /// @param consent The node's consent; its provider must be the caller.
    /// @param nodeSignature ECDSA signature of the node's key over the consent.
    function addNode(NodeConsent calldata consent, bytes calldata nodeSignature) external {
        if (payoutOf[msg.sender] == address(0)) revert Errors.NotProvider(msg.sender);
        _addNode(consent, nodeSignature);
    }

    /// @notice Removes a node; its seats in pools, and who answers for them, stay as they are.
    /// @param node The caller's node, or the caller itself.
    function removeNode(address node) external {
        address provider = providerOf[node];
        if (provider == address(0)) revert Errors.UnknownNode(node);
        if (msg.sender != provider && msg.sender != node) revert Errors.NotAllowed(msg.sender);
        delete providerOf[node];
        emit NodeRemoved(provider, node);
    }

    /// @notice Moves a node of the caller to a new key (a lost or stolen one, a new machine): the old key
    /// is let go, the new one takes its seats. What the old key earned is still paid, under the old
    /// key; what it did is still answered for.
    /// @param from The caller's node.
    /// @param consent The new key's consent; its provider must be the caller.
    /// @param nodeSignature ECDSA signature of the new key over the consent.
    /// @param seats Pools in which the seat goes along (see `Pools.moveSeat`).
    function moveNode(
        address from,
        NodeConsent calldata consent,
        bytes calldata nodeSignature,
        uint256[] calldata seats
    ) external {
        if (providerOf[from] != msg.sender) {
            revert Errors.NotAllowed(msg.sender);
        }
        delete providerOf[from];
        emit NodeRemoved(msg.sender, from);
        _addNode(consent, nodeSignature);
        movedTo[from] = consent.node;
        emit NodeMoved(msg.sender, from, consent.node);
        for (uint256 i; i < seats.length; ++i) {
            pools.moveSeat(seats[i], from, consent.node);
        }
    }

    /// @notice Voids every session of `node` granted before `at`, for good.
    /// @param node The caller's node, or the caller itself (any account that grants sessions).
    /// @param at Unix time; later than the last one set.
    function setRevokedBefore(address node, uint64 at) external {
        if (msg.sender != node && msg.sender != providerOf[node]) {
            revert Errors.NotAllowed(msg.sender);
        }
        uint64 current = revokedBefore[node];
        if (at <= current) revert Errors.RevocationNotLater(current, at);
        revokedBefore[node] = at;
        emit RevokedBefore(node, at);
    }

    /// @notice Everything a newcomer needs in one transaction: registers the caller as a provider
    /// if it is not yet, stakes (if `amount` is not zero), binds the node, takes the seat. Being the
    /// provider's own call, it is also its consent to the seat.
    /// @param payout Where rewards go; ignored if the caller is registered already.
    /// @param amount Stake to deposit.
    /// @param deadline Of the permit.
    /// @param v Of the permit. An allowance given before does as well.
    /// @param r Of the permit.
    /// @param s Of the permit.
    /// @param consent The node's consent.
    /// @param nodeSignature The node's signature over it.
    /// @param invite The manager's invite, for the node of `consent`.
    /// @param managerSignature The manager's signature over it.
    function enroll(
        address payout,
        uint256 amount,
        uint256 deadline,
        uint8 v,
        bytes32 r,
        bytes32 s,
        NodeConsent calldata consent,
        bytes calldata nodeSignature,
        Invite calldata invite,
        bytes calldata managerSignature
    ) external {
        // The pools take our call for the consent of the invited node's provider.
        if (invite.node != consent.node) revert Errors.UnknownNode(invite.node);
        if (payoutOf[msg.sender] == address(0)) {
            _registerProvider(payout);
        }
        _addNode(consent, nodeSignature);
        if (amount > 0) vault.depositFor(msg.sender, amount, deadline, v, r, s);
        pools.join(invite, managerSignature);
    }

    /// @notice Whether `account` is a registered provider.
    function isProvider(address account) external view returns (bool) {
        return payoutOf[account] != address(0);
    }

    /// @notice EIP-712 digest of a consent under this contract's domain.
    function consentDigest(NodeConsent calldata consent) public view returns (bytes32) {
        return _hashTypedDataV4(Statements.hash(consent));
    }

    function _registerProvider(address payout) private {
        if (payout == address(0)) revert Errors.ZeroAddress();
        payoutOf[msg.sender] = payout;
        emit ProviderRegistered(msg.sender, payout);
    }

    function _addNode(NodeConsent calldata consent, bytes calldata nodeSignature) private {
        address node = consent.node;
        if (consent.provider != msg.sender) revert Errors.NotAllowed(msg.sender);
        if (block.timestamp > consent.deadline) {
            revert Errors.Expired(consent.deadline, block.timestamp);
        }
        if (providerOf[node] != address(0)) revert Errors.NodeTaken(node, providerOf[node]);
        if (consentUsed[node][consent.salt]) revert Errors.ConsentUsed(node, consent.salt);
        Statements.checkKey(node, consentDigest(consent), nodeSignature);

        consentUsed[node][consent.salt] = true;
        providerOf[node] = msg.sender;
        emit NodeAdded(msg.sender, node);
    }
}

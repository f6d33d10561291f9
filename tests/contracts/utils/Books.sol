// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Slasher } from "../../../contracts/src/Slasher.sol";
import { Submission } from "../../../contracts/src/libraries/Statements.sol";
import { Network } from "./Network.sol";
import { vm } from "./Vm.sol";

/// @notice What the handler records besides the contracts: books of its own, written from the rules,
/// not from the contracts' state.
abstract contract Books is Network {
    uint256 internal constant PROVIDERS = 3;
    uint256 internal constant NODES = 6;
    /// @dev Keys that a node may have over a run, after moves.
    uint256 internal constant KEYS = 12;
    uint256 internal constant PAY = 1e18;

    /// @dev A submission as the handler remembers it.
    struct Work_ {
        uint256 pool;
        uint256 number;
        uint256 node;
        uint64 seq;
        uint256 postedAt;
        bool rejected;
        bytes32 id;
        bool credited;
    }

    /// @dev A reward root as the handler remembers it.
    struct Table {
        uint256 pool;
        uint64 epoch;
        uint256 claimableAt;
        uint256[KEYS] amounts;
        bool disabled;
        uint256 worksUpTo;
    }

    struct Unbonded {
        uint256 amount;
        uint256 since;
    }

    uint256[2] public poolIds;
    address[PROVIDERS] public providers;
    /// @dev All keys' addresses, and the key that each of the nodes has now.
    address[KEYS] public nodes;
    uint256[NODES] internal at;
    uint256[KEYS] internal providerOf;
    mapping(uint256 => uint256) internal movedAt;
    /// @dev When a key was moved away last, and where its seat in a pool went, one more than the key.
    mapping(uint256 => uint256) internal leftAt;
    mapping(uint256 => mapping(address => uint256)) internal seatWent;
    uint256 internal keys = NODES;
    Work_[] internal works;
    Table[] internal tables;
    uint256 internal rooted;

    mapping(address => uint256) public deposited;
    mapping(address => uint256) public withdrawn;
    mapping(address => uint256) public slashed;
    mapping(address => Unbonded[]) internal unbonded;
    mapping(address => uint256) public rebonded;
    mapping(address => uint256) public openCount;
    mapping(address => uint256) public snapshot;
    mapping(address => uint256) public taken;
    mapping(bytes32 => uint256) public executions;
    mapping(bytes32 => uint256) public proposedAt;
    /// @dev The deposit in force when a proposal was made.
    mapping(bytes32 => uint256) internal depositAt;
    mapping(bytes32 => uint256) internal workOf;
    uint256 public deposits;
    mapping(bytes32 => uint256) internal depositOf;
    bytes32[] internal ids;
    mapping(uint256 => uint256) public funded;
    mapping(uint256 => uint256) public bonded;
    mapping(uint256 => uint256) public drawn;
    mapping(uint256 => uint256) public bondBack;
    mapping(uint256 => uint256) public refunded;
    mapping(uint256 => mapping(uint256 => uint256)) public paid;
    uint256 public thefts;
    mapping(bytes32 => uint256) public calls;

    constructor() {
        deployNetwork();
    }

    /// @dev Called by the test once the token's supply is here.
    function open() external {
        poolIds[0] = pool;
        poolIds[1] = createPool();
        vm.startPrank(manager);
        pools.setValidator(poolIds[1], validator, true);
        pools.setValidator(poolIds[1], validator2, true);
        vm.stopPrank();
        deposited[validator] = BONDS;
        deposited[validator2] = BONDS;
        for (uint256 i; i < PROVIDERS; ++i) {
            providers[i] = address(uint160(0x9000 + i));
            register(providers[i], address(uint160(0xCA000 + i)));
            allow(providers[i], poolIds[1]);
            stakeFor(providers[i], 4 * STAKE);
        }
        for (uint256 i; i < KEYS; ++i) {
            nodes[i] = vm.addr(keyOf(i));
        }
        for (uint256 i; i < NODES; ++i) {
            at[i] = i;
            providerOf[i] = i / 2;
            addNode(providers[i / 2], keyOf(i));
        }
        for (uint256 i; i < 4; ++i) {
            join(nodes[i]);
        }
        for (uint256 i; i < 2; ++i) {
            fundPool(poolIds[i], 100 * PAY);
        }
        give(arbiter, DEPOSIT);
    }

    function keyOf(uint256 i) internal pure returns (uint256) {
        return 0x40DE00 + i;
    }

    function stakeFor(address who, uint256 amount) internal {
        stake(who, amount);
        deposited[who] += amount;
        if (openCount[who] != 0) snapshot[who] += amount;
    }

    function fundPool(uint256 id, uint256 amount) internal {
        pool = id;
        fund(amount);
        funded[id] += amount;
    }

    function pick(uint256 seed) internal view returns (address) {
        uint256 i = seed % (PROVIDERS + 2);
        if (i < PROVIDERS) return providers[i];
        return i == PROVIDERS ? validator : validator2;
    }

    /// @dev An act that took place; the suite asserts that all of them do.
    function did(bytes32 what) internal {
        ++calls[what];
    }

    // -------------------------------------------------------------------------------------- clock

    function clock(uint256 seed) external {
        vm.warp(block.timestamp + 1 + seed % 45);
    }

    /// @dev Half of the acts that have a time of their own wait for it first.
    function wait(uint256 seed, uint256 until) internal {
        if (seed % 2 == 0 && block.timestamp < until) vm.warp(until);
    }

    function submissionOf(Work_ memory w) internal view returns (Submission memory) {
        return Submission(
            w.pool,
            keccak256(abi.encode(w.number)),
            nodes[w.node],
            1,
            0,
            keccak256("f"),
            1,
            1,
            type(uint64).max
        );
    }

    /// @dev Whether its provider stopped it, and it was not judged.
    function isStopped(Slasher.Proposal memory p) internal pure returns (bool) {
        return p.state == Slasher.State.Disputed || p.state == Slasher.State.Objected;
    }

    /// @notice Proposals that are open.
    function openProposals() external view returns (uint256 sum) {
        for (uint256 i; i < ids.length; ++i) {
            Slasher.Proposal memory p = slasher.proposal(ids[i]);
            if (p.state == Slasher.State.Proposed || isStopped(p)) ++sum;
        }
    }

    function someId(uint256 seed) internal view returns (bytes32 id, Slasher.Proposal memory p) {
        if (ids.length == 0) return (0, p);
        // Mostly one of the last: the others are settled.
        uint256 back = seed % (seed % 5 == 0 || ids.length < 3 ? ids.length : 3);
        id = ids[ids.length - 1 - back];
        p = slasher.proposal(id);
    }

    // -------------------------------------------------------------------------------------- views

    function accounts() external view returns (address[] memory list) {
        list = new address[](PROVIDERS + 2);
        for (uint256 i; i < list.length; ++i) {
            list[i] = pick(i);
        }
    }

    function contracts()
        external
        view
        returns (address, address, address, address, address, address)
    {
        return (
            address(token),
            address(vault),
            address(pools),
            address(work),
            address(rewards),
            address(slasher)
        );
    }

    /// @notice What an account may have withdrawn by now: what it unbonded long enough ago.
    function matured(address owner) external view returns (uint256 sum) {
        for (uint256 i; i < unbonded[owner].length; ++i) {
            if (unbonded[owner][i].since + UNBONDING <= block.timestamp) {
                sum += unbonded[owner][i].amount;
            }
        }
    }

    /// @notice Sum of what the provider's seats need.
    function seatsOf(uint256 p) external view returns (uint256 sum) {
        for (uint256 where; where < 2; ++where) {
            for (uint256 n; n < keys; ++n) {
                if (providerOf[n] == p && pools.isMember(poolIds[where], nodes[n])) sum += STAKE;
            }
        }
    }

    /// @notice Works of a pool that were accepted, and the number that are rejected and credited.
    function credits(uint256 where) external view returns (uint256 good, uint256 both) {
        for (uint256 i; i < works.length; ++i) {
            if (works[i].pool != poolIds[where]) continue;
            if (!works[i].rejected) ++good;
            else if (works[i].credited) ++both;
        }
    }

    /// @notice Most times that one submission was slashed.
    function mostExecutions() external view returns (uint256 most) {
        for (uint256 i; i < ids.length; ++i) {
            if (executions[ids[i]] > most) most = executions[ids[i]];
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Court } from "../../../contracts/src/Court.sol";
import { Pools } from "../../../contracts/src/Pools.sol";
import { PrimeToken } from "../../../contracts/src/PrimeToken.sol";
import { Registry } from "../../../contracts/src/Registry.sol";
import { Rewards } from "../../../contracts/src/Rewards.sol";
import { Slasher } from "../../../contracts/src/Slasher.sol";
import { StakeVault } from "../../../contracts/src/StakeVault.sol";
import { IUptimeFeed } from "../../../contracts/src/WindowTime.sol";
import { Work } from "../../../contracts/src/Work.sol";
import { Errors } from "../../../contracts/src/libraries/Errors.sol";
import { Periods } from "../../../contracts/src/libraries/Periods.sol";
import {
    Invite,
    Law,
    NodeConsent,
    Opinion,
    Opinions,
    RewardTable,
    Statements,
    Submission,
    Voice
} from "../../../contracts/src/libraries/Statements.sol";
import { Tree } from "./Tree.sol";
import { vm } from "./Vm.sol";

/// @notice A deployed network with one pool, people in it, and the verbs that tests are written in.
abstract contract Network {
    uint64 internal constant EPOCH = 30;
    uint64 internal constant VALIDITY = 90;
    uint64 internal constant WINDOW = 20;
    uint64 internal constant DISPUTE = 40;
    uint64 internal constant DELAY = 20;
    uint64 internal constant UNBONDING = 180;
    uint64 internal constant START = 1_800_000_000;
    uint32 internal constant LEASE = 1 hours;

    uint256 internal constant STAKE = 100e18;
    uint256 internal constant DEPOSIT = 5e18;
    uint256 internal constant BOND = 50e18;
    /// @dev What each validator has: bonds for ten open proposals.
    uint256 internal constant BONDS = 10 * BOND;
    uint256 internal constant JUROR_BOND = 20e18;
    uint256 internal constant CAP = 1e24;
    IUptimeFeed internal constant NO_FEED = IUptimeFeed(address(0));
    uint32 internal constant CAPACITY = 4;
    bytes32 internal constant RUN = keccak256("run");
    bytes32 internal constant EVIDENCE = keccak256("evidence");

    uint256 internal constant MANAGER_KEY = 0xA11CE;
    uint256 internal constant TRAINER_KEY = 0x7EACE;
    uint256 internal constant NODE_KEY = 0x40DE;
    uint256 internal constant NODE2_KEY = 0x40DF;
    uint256 internal constant PROVIDER_KEY = 0x9807;
    uint256 internal constant VALIDATOR_KEY = 0x7A1;
    uint256 internal constant VALIDATOR2_KEY = 0x7A2;
    bytes32 internal constant CLASS = keccak256("class");
    /// @dev Struct hash of `law()`.
    bytes32 internal constant LAW = keccak256(
        abi.encode(
            Statements.LAW, keccak256("lease"), RUN, CLASS, keccak256("verifier"), bytes32(0)
        )
    );
    bytes32 internal constant REASON = keccak256("WRONG_SAMPLING");

    address internal manager = vm.addr(MANAGER_KEY);
    address internal trainer = vm.addr(TRAINER_KEY);
    address internal node = vm.addr(NODE_KEY);
    address internal node2 = vm.addr(NODE2_KEY);
    address internal provider = vm.addr(PROVIDER_KEY);
    address internal payout = address(0xCA54);
    address internal treasury = address(0x7EA5);
    address internal validator = vm.addr(VALIDATOR_KEY);
    address internal validator2 = vm.addr(VALIDATOR2_KEY);
    address internal arbiter = address(0x60A2);
    address internal governor = address(0x60B);
    address internal stranger = address(0x57A);

    PrimeToken internal token;
    Registry internal registry;
    StakeVault internal vault;
    Pools internal pools;
    Work internal work;
    Rewards internal rewards;
    Slasher internal slasher;
    Court internal court;
    uint256 internal pool;

    uint64 private _inviteDeadline;
    uint256 private _salt;

    function deployNetwork() internal {
        deployNetwork(new PrimeToken(true, address(this), 1_000_000e18));
    }

    function deployNetwork(PrimeToken token_) internal {
        vm.warp(START);
        token = token_;
        registry = new Registry();
        vault = new StakeVault(token, periods(), treasury, CAP, feed());
        pools = new Pools(registry, vault);
        work = new Work(pools, vault);
        court = new Court(vault, pools, work, JUROR_BOND);
        slasher = new Slasher(
            vault, pools, work, court, Slasher.Roles(arbiter, DEPOSIT, BOND, governor)
        );
        rewards = new Rewards(token, registry, pools, vault, slasher);
        vault.wire(address(registry), address(pools), address(slasher));
        pools.wire(address(slasher));
        court.wire(slasher);
        registry.wire(vault, pools);
        pool = createPool();
        bondValidator(validator);
        bondValidator(validator2);
        _inviteDeadline = START + 365 days;
    }

    /// @dev Says when the sequencer was down.
    function feed() internal virtual returns (IUptimeFeed) {
        return NO_FEED;
    }

    function periods() internal pure returns (Periods memory) {
        return Periods(EPOCH, VALIDITY, WINDOW, DISPUTE, DELAY, UNBONDING);
    }

    /// @dev A pool in which two opinions count, and a slash takes a whole seat's stake.
    function config() internal view returns (Pools.Config memory) {
        return Pools.Config({
            trainer: trainer,
            runDigest: RUN,
            stakePerSeat: uint88(STAKE),
            slashAmount: uint88(STAKE),
            capacity: CAPACITY,
            quorum: 2,
            leaseSeconds: LEASE
        });
    }

    function createPool() internal returns (uint256 id) {
        vm.prank(manager);
        id = pools.create(config());
        allow(provider, id);
    }

    function bondValidator(address who) internal {
        stake(who, BONDS);
        vm.prank(manager);
        pools.setValidator(pool, who, true);
    }

    // -------------------------------------------------------------------------------------- money

    function give(address to, uint256 amount) internal {
        token.transfer(to, amount);
    }

    function stake(address who, uint256 amount) internal {
        give(who, amount);
        vm.startPrank(who);
        token.approve(address(vault), amount);
        vault.deposit(amount);
        vm.stopPrank();
    }

    function fund(uint256 amount) internal {
        give(manager, amount);
        vm.startPrank(manager);
        token.approve(address(rewards), amount);
        rewards.fund(pool, amount);
        vm.stopPrank();
    }

    function addBond(uint256 amount) internal {
        give(manager, amount);
        vm.startPrank(manager);
        token.approve(address(rewards), amount);
        rewards.bond(pool, amount);
        vm.stopPrank();
    }

    // --------------------------------------------------------------------------------- signatures

    function sign(uint256 key, bytes32 digest) internal pure returns (bytes memory) {
        (uint8 v, bytes32 r, bytes32 s) = vm.sign(key, digest);
        return abi.encodePacked(r, s, v);
    }

    function consent(address provider_, address node_) internal returns (NodeConsent memory) {
        return NodeConsent(provider_, node_, bytes32(++_salt), uint64(block.timestamp) + 1 hours);
    }

    function invite(address node_) internal returns (Invite memory) {
        return Invite(pool, node_, ++_inviteDeadline);
    }

    function signed(Invite memory i) internal view returns (bytes memory) {
        return sign(MANAGER_KEY, pools.inviteDigest(i));
    }

    function signed(NodeConsent memory c, uint256 key) internal view returns (bytes memory) {
        return sign(key, registry.consentDigest(c));
    }

    // ---------------------------------------------------------------------------------- the verbs

    function register(address provider_, address payout_) internal {
        vm.prank(provider_);
        registry.registerProvider(payout_);
        allow(provider_, pool);
    }

    /// @dev The provider lets a pool seat its nodes.
    function allow(address provider_, uint256 pool_) internal {
        vm.prank(provider_);
        pools.allow(pool_, true);
    }

    function addNode(address provider_, uint256 nodeKey) internal {
        NodeConsent memory c = consent(provider_, vm.addr(nodeKey));
        bytes memory signature = signed(c, nodeKey);
        vm.prank(provider_);
        registry.addNode(c, signature);
    }

    function join(address node_) internal {
        Invite memory i = invite(node_);
        pools.join(i, signed(i));
    }

    /// @dev The provider with `amount` at stake and its first node in a seat.
    function seatNode(uint256 amount) internal {
        register(provider, payout);
        stake(provider, amount);
        addNode(provider, NODE_KEY);
        join(node);
    }

    function submission(uint256 number) internal view returns (Submission memory) {
        return Submission({
            pool: pool,
            leaseDigest: keccak256(abi.encode("lease", number)),
            node: node,
            step: 1,
            policyDigest: keccak256("policy"),
            sha256: keccak256(abi.encode("file", number)),
            size: 1000,
            rows: 64,
            validUntil: uint64(block.timestamp) + LEASE
        });
    }

    function one(bytes32 leaf) internal pure returns (bytes32[] memory leaves) {
        leaves = new bytes32[](1);
        leaves[0] = leaf;
    }

    function none() internal pure returns (bytes32[] memory) {
        return new bytes32[](0);
    }

    function postRoot(bytes32[] memory leaves) internal returns (uint64 seq) {
        bytes32 root = Tree.root(leaves);
        vm.prank(manager);
        seq = work.postRoot(pool, root, uint32(leaves.length), keccak256("object"));
    }

    /// @dev EIP-712 digest under the work contract's domain, without a call to it.
    function underWork(bytes32 structHash) internal view returns (bytes32) {
        bytes32 domain = keccak256(
            abi.encode(
                keccak256(
                    "EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"
                ),
                keccak256("Prime"),
                keccak256("1"),
                block.chainid,
                address(work)
            )
        );
        return keccak256(abi.encodePacked("\x19\x01", domain, structHash));
    }

    function leafOf(Submission memory s) internal view returns (bytes32) {
        return underWork(Statements.hash(s));
    }

    /// @dev The law under which the validators judge.
    function law() internal pure returns (Law memory) {
        return Law(keccak256("lease"), RUN, CLASS, keccak256("verifier"), 0);
    }

    /// @dev What the keys say of a submission, in this order.
    function opinions(Submission memory s, uint8 outcome, uint256[] memory keys_)
        internal
        view
        returns (Opinions memory o)
    {
        bytes32 evidence = outcome == 2 ? EVIDENCE : bytes32(0);
        o = Opinions(LAW, outcome, new Voice[](keys_.length));
        bytes32 leaf = leafOf(s);
        for (uint256 i; i < keys_.length; ++i) {
            uint64 at_ = uint64(block.timestamp);
            bytes32 digest = underWork(
                Statements.hash(Opinion(s.pool, leaf, LAW, outcome, REASON, 0, evidence, at_))
            );
            o.voices[i] = Voice(REASON, 0, evidence, at_, sign(keys_[i], digest));
        }
    }

    /// @dev What the keys sign of a reward table, in this order.
    function tabled(RewardTable memory table, uint256[] memory keys_)
        internal
        view
        returns (bytes[] memory signatures)
    {
        signatures = new bytes[](keys_.length);
        bytes32 digest = rewards.rewardTableDigest(table);
        for (uint256 i; i < keys_.length; ++i) {
            signatures[i] = sign(keys_[i], digest);
        }
    }

    /// @dev Both validators reject it.
    function rejections(Submission memory s) internal view returns (Opinions memory) {
        return opinions(s, 2, bothKeys());
    }

    function bothKeys() internal pure returns (uint256[] memory keys_) {
        keys_ = new uint256[](2);
        (keys_[0], keys_[1]) = (VALIDATOR_KEY, VALIDATOR2_KEY);
    }

    function oneKey(uint256 key) internal pure returns (uint256[] memory keys_) {
        keys_ = new uint256[](1);
        keys_[0] = key;
    }

    /// @dev Roots submission `number` alone and proposes to slash it.
    function propose(uint256 number) internal returns (bytes32 id) {
        return proposeIt(submission(number), NODE_KEY);
    }

    function proposeIt(Submission memory s, uint256 key) internal returns (bytes32 id) {
        uint64 seq = postRoot(one(leafOf(s)));
        id = slasher.propose(s, sign(key, leafOf(s)), seq, none(), rejections(s));
    }

    function dispute(bytes32 id) internal {
        give(provider, DEPOSIT);
        vm.startPrank(provider);
        token.approve(address(slasher), DEPOSIT);
        slasher.dispute(id);
        vm.stopPrank();
    }

    /// @dev The account takes a seat in the register of the class.
    function registerJuror(address who) internal {
        give(who, JUROR_BOND);
        vm.startPrank(who);
        token.approve(address(court), JUROR_BOND);
        court.register(CLASS);
        vm.stopPrank();
    }

    /// @dev The provider asks for the court, naming the first seven seats.
    function openCase(Submission memory s) internal {
        openCase(s, rejections(s), law(), firstSeats(7), 2);
    }

    function openCase(
        Submission memory s,
        Opinions memory o,
        Law memory l,
        uint256[] memory seats,
        uint8 validators
    ) internal {
        vm.prank(provider);
        court.open(s, o, l, seats, validators);
    }

    function firstSeats(uint256 n) internal pure returns (uint256[] memory seats) {
        seats = new uint256[](n);
        for (uint256 i; i < n; ++i) {
            seats[i] = i;
        }
    }

    /// @dev The earliest time at which `epoch`'s reward root can be posted.
    function postable(uint64 epoch) internal pure returns (uint256) {
        return (uint256(epoch) + 1) * EPOCH + VALIDITY;
    }

    function assertState(bytes32 id, Slasher.State expected) internal view {
        vm.assertEq(uint256(slasher.proposal(id).state), uint256(expected), "state");
    }

    /// @dev The provider's stake.
    function assertStake(uint256 active, uint256 pending) internal view {
        vm.assertEq(vault.active(provider), active, "active");
        vm.assertEq(vault.pendingSlash(provider), pending, "pending");
    }

    function expect(bytes memory error_) internal {
        vm.expectRevert(error_);
    }

    function expectNotAllowed(address caller) internal {
        vm.expectRevert(abi.encodeWithSelector(Errors.NotAllowed.selector, caller));
    }
}

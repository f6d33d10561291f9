// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Court } from "../../contracts/src/Court.sol";
import { Slasher } from "../../contracts/src/Slasher.sol";
import { Submission } from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

/// @notice Random acts of jurors, a provider and the arbiter upon cases of the court.
contract CourtHandler is Network {
    bytes32 private constant SALT = keccak256("salt");

    address[] public people;
    bytes32[] public leaves;
    uint256 private number;
    mapping(bytes32 leaf => mapping(address juror => uint256)) private intent;
    mapping(bytes32 leaf => bool) private seen;
    mapping(address juror => uint256) public bondAtDraw;

    function start() external {
        deployNetwork();
        seatNode(1000 * STAKE);
        stake(validator, 1000 * BOND);
        stake(validator2, 1000 * BOND);
        for (uint256 i; i < 12; ++i) {
            people.push(address(uint160(0x1000 + i)));
            registerJuror(people[i]);
        }
        people.push(provider);
        people.push(manager);
        people.push(validator);
        people.push(validator2);
        for (uint256 i = 12; i < 16; ++i) {
            registerJuror(people[i]);
        }
    }

    function parts() external view returns (address, address, address, uint256) {
        return (address(court), address(token), address(pools), pool);
    }

    function counts() external view returns (uint256, uint256) {
        return (people.length, leaves.length);
    }

    function isParty(address who) external view returns (bool) {
        return who == provider || who == manager || who == validator || who == validator2;
    }

    function clock(uint256 seed) external {
        vm.warp(vm.getBlockTimestamp() + seed % 15);
        vm.roll(vm.getBlockNumber() + 1 + seed % 3);
    }

    function comeOrGo(uint256 seed) external {
        address who = people[seed % people.length];
        Court.Juror memory j = court.jurorOf(CLASS, who);
        if (j.seat != 0) {
            if (seed % 5 != 0) return;
            vm.prank(who);
            court.leave(CLASS);
        } else if (j.drawn == 0 && j.bond != 0) {
            vm.prank(who);
            court.withdraw(CLASS);
        } else if (j.drawn == 0) {
            registerJuror(who);
        } else {
            vm.expectRevert();
            vm.prank(who);
            court.withdraw(CLASS);
        }
    }

    function collect(uint256 seed) external {
        address who = people[seed % people.length];
        if (court.payOf(who) == 0) return;
        vm.prank(who);
        court.collect();
    }

    function disputeOne(uint256) external {
        Submission memory s = submission(++number);
        uint256[] memory seats = sevenSeats();
        if (seats.length < 7 || !pools.isMember(pool, node)) return;
        bytes32 leaf = proposeIt(s, NODE_KEY);
        openCase(s, rejections(s), law(), seats, 2);
        dispute(leaf);
        leaves.push(leaf);
        court.draw(leaf);
    }

    function sevenSeats() private view returns (uint256[] memory seats) {
        Court.Seat[] memory all = court.seatsOf(CLASS);
        seats = new uint256[](7);
        uint256 found;
        for (uint256 i; i < all.length && found < 7; ++i) {
            address who = all[i].account;
            if (who != address(0) && !this.isParty(who)) seats[found++] = i;
        }
        if (found < 7) seats = new uint256[](0);
    }

    function draw(uint256 seed) external {
        (bytes32 leaf, Court.Case memory c,) = some(seed);
        if (c.status != Court.Status.Open) return;
        Slasher.Proposal memory p = slasher.proposal(leaf);
        if (p.state != Slasher.State.Disputed) return;
        if (vm.getBlockTimestamp() >= p.deadline - DISPUTE / 2) return;
        vm.roll(vm.getBlockNumber() + 2);
        court.draw(leaf);
    }

    function commit(uint256 seed) external {
        (bytes32 leaf, Court.Case memory c, address[] memory jurors) = some(seed);
        if (c.status != Court.Status.Drawn || vm.getBlockTimestamp() >= c.revealFrom) return;
        for (uint256 i; i < 3; ++i) {
            uint256 mind = (seed >> (8 * i + 8)) % 8;
            if (mind == 0 || intent[leaf][jurors[i]] != 0) continue;
            intent[leaf][jurors[i]] = mind;
            bytes32 made = court.commitmentOf(leaf, jurors[i], voteOf(mind), RUN, SALT);
            vm.prank(jurors[i]);
            court.commit(leaf, made);
        }
        if (seed % 2 == 0) vm.warp(c.revealFrom);
    }

    /// @dev A mind of 0 commits to nothing, one of 7 commits and does not reveal.
    function voteOf(uint256 mind) private pure returns (uint8) {
        if (mind == 1) return 3;
        return mind > 3 ? 1 : 2;
    }

    function revealed(bytes32 leaf, address who) private view returns (bool) {
        return court.ballotOf(leaf, who).vote != 0;
    }

    function reveal(uint256 seed) external {
        (bytes32 leaf, Court.Case memory c, address[] memory jurors) = some(seed);
        uint256 time = vm.getBlockTimestamp();
        if (c.status != Court.Status.Drawn || time < c.revealFrom || time >= c.revealUntil) return;
        for (uint256 i; i < 3; ++i) {
            uint256 mind = intent[leaf][jurors[i]];
            if (mind == 0 || mind == 7 || revealed(leaf, jurors[i])) continue;
            vm.prank(jurors[i]);
            court.reveal(leaf, voteOf(mind), RUN, SALT);
        }
        if (!pools.isMember(pool, node)) {
            vm.prank(manager);
            pools.setBan(pool, node, false);
            join(node);
        }
    }

    function finish(uint256 seed) external {
        (bytes32 leaf, Court.Case memory c,) = some(seed);
        if (seed % 4 == 0 && slasher.proposal(leaf).state == Slasher.State.Disputed) {
            vm.prank(arbiter);
            slasher.cancel(leaf);
        }
        if (c.status != Court.Status.Drawn) return;
        uint256 votes = c.confirming + c.overturning;
        if (votes < 3 && vm.getBlockTimestamp() < c.revealUntil) return;
        if (slasher.proposal(leaf).state == Slasher.State.Disputed) {
            if (vm.getBlockTimestamp() < slasher.proposal(leaf).deadline) return;
            slasher.lapse(leaf);
        }
        court.settle(leaf);
    }

    function some(uint256 seed)
        private
        view
        returns (bytes32 leaf, Court.Case memory c, address[] memory jurors)
    {
        if (leaves.length == 0) return (leaf, c, jurors);
        // The newest ones: what happens to the others is decided.
        uint256 recent = leaves.length < 3 ? leaves.length : 3;
        leaf = leaves[leaves.length - 1 - seed % recent];
        (c, jurors) = court.caseOf(leaf);
    }
}

/// @notice What must hold of the court after any sequence of acts.
contract CourtInvariant {
    CourtHandler private handler;

    function setUp() public {
        handler = new CourtHandler();
        handler.start();
    }

    function targetContracts() public view returns (address[] memory list) {
        list = new address[](1);
        list[0] = address(handler);
    }

    struct FuzzSelector {
        address addr;
        bytes4[] selectors;
    }

    function targetSelectors() public view returns (FuzzSelector[] memory list) {
        bytes4[] memory s = new bytes4[](8);
        s[0] = handler.clock.selector;
        s[1] = handler.comeOrGo.selector;
        s[2] = handler.collect.selector;
        s[3] = handler.disputeOne.selector;
        s[4] = handler.draw.selector;
        s[5] = handler.commit.selector;
        s[6] = handler.reveal.selector;
        s[7] = handler.finish.selector;
        list = new FuzzSelector[](1);
        list[0] = FuzzSelector(address(handler), s);
    }

    /// forge-config: default.invariant.runs = 24
    /// forge-config: ci.invariant.runs = 512
    function invariant_Court_BalanceIsBondsPayAndPots_JurorsAreDistinctAndNoParty() public view {
        (address c, address t,,) = handler.parts();
        Court court = Court(c);
        bytes32 class = keccak256("class");
        (uint256 people, uint256 cases) = handler.counts();
        uint256 owed;
        uint256 drawn;
        uint256 seated;
        for (uint256 i; i < people; ++i) {
            Court.Juror memory j = court.jurorOf(class, handler.people(i));
            owed += j.bond + court.payOf(handler.people(i));
            drawn += j.drawn;
            // An account that can be drawn, or was and is not released, has its bond here.
            if (j.seat != 0 || j.drawn != 0) vm.assertTrue(j.bond > 0, "no bond");
            if (j.seat != 0) {
                ++seated;
                vm.assertEq(court.seatsOf(class)[j.seat - 1].account, handler.people(i));
            }
        }
        uint256 open;
        for (uint256 i; i < cases; ++i) {
            (Court.Case memory one, address[] memory jurors) = court.caseOf(handler.leaves(i));
            if (one.status == Court.Status.Drawn) {
                owed += one.pot;
                open += 3;
            }
            if (jurors.length == 0) continue;
            vm.assertTrue(
                jurors[0] != jurors[1] && jurors[1] != jurors[2] && jurors[0] != jurors[2]
            );
            for (uint256 k; k < 3; ++k) {
                vm.assertFalse(handler.isParty(jurors[k]));
            }
        }
        vm.assertEq(drawn, open, "jurors of open cases");
        uint256 taken;
        for (uint256 i; i < court.seatsOf(class).length; ++i) {
            if (court.seatsOf(class)[i].account != address(0)) ++taken;
        }
        vm.assertEq(seated, taken, "seats");
        (bool done, bytes memory answer) =
            t.staticcall(abi.encodeWithSignature("balanceOf(address)", c));
        vm.assertTrue(done);
        vm.assertEq(abi.decode(answer, (uint256)), owed, "balance");
    }
}

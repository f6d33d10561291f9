// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { IERC20 } from "@openzeppelin/contracts/token/ERC20/IERC20.sol";

import { Court } from "../../contracts/src/Court.sol";
import { Pools } from "../../contracts/src/Pools.sol";
import { Registry } from "../../contracts/src/Registry.sol";
import { Rewards } from "../../contracts/src/Rewards.sol";
import { Slasher } from "../../contracts/src/Slasher.sol";
import { StakeVault } from "../../contracts/src/StakeVault.sol";
import { Work } from "../../contracts/src/Work.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Invite } from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

/// @notice What is missing, zero or sent by the wrong contract is refused by name.
contract BlanksTest is Network {
    function setUp() public {
        deployNetwork();
        seatNode(4 * STAKE);
    }

    function noAddress() private {
        expect(abi.encodeWithSelector(Errors.ZeroAddress.selector));
    }

    function test_Wire_RefusesZero() public {
        StakeVault v = new StakeVault(token, periods(), treasury, CAP, NO_FEED);
        Pools p = new Pools(registry, v);
        for (uint256 i; i < 3; ++i) {
            address[3] memory given = [address(1), address(2), address(3)];
            given[i] = address(0);
            expect(abi.encodeWithSelector(Errors.ZeroAddress.selector));
            v.wire(given[0], given[1], given[2]);
        }
        expect(abi.encodeWithSelector(Errors.ZeroAddress.selector));
        p.wire(address(0));
    }

    function test_Pools_WireOnceAndByDeployerOnly() public {
        expect(abi.encodeWithSelector(Errors.AlreadyWired.selector));
        pools.wire(address(1));
        expectNotAllowed(stranger);
        vm.prank(stranger);
        pools.wire(address(1));
    }

    function test_Constructors_RefuseZero() public {
        noAddress();
        new Pools(Registry(address(0)), vault);
        noAddress();
        new Work(Pools(address(0)), vault);
        noAddress();
        new Rewards(IERC20(address(0)), registry, pools, vault, slasher);
        noAddress();
        new Rewards(token, Registry(address(0)), pools, vault, slasher);
        noAddress();
        new Rewards(token, registry, Pools(address(0)), vault, slasher);
        noAddress();
        new Rewards(token, registry, pools, vault, Slasher(address(0)));
        Slasher.Roles memory roles = Slasher.Roles(arbiter, 1, 1, governor);
        noAddress();
        new Slasher(vault, Pools(address(0)), work, court, roles);
        noAddress();
        new Slasher(vault, pools, Work(address(0)), court, roles);
        noAddress();
        new Slasher(vault, pools, work, Court(address(0)), roles);
    }

    function test_Expel_BySlasherOnly() public {
        expectNotAllowed(manager);
        vm.prank(manager);
        pools.expel(pool, node, provider);
    }

    function test_Join_RefusesANodeWithoutOwner() public {
        Invite memory i = invite(node2);
        bytes memory signature = signed(i);
        expect(abi.encodeWithSelector(Errors.UnknownNode.selector, node2));
        pools.join(i, signature);
    }

    function test_Rebond_RefusesZeroAndMoreThanIsUnbonding() public {
        vm.startPrank(provider);
        vault.unbond(STAKE);
        expect(abi.encodeWithSelector(Errors.ZeroAmount.selector));
        vault.rebond(0);
        expect(abi.encodeWithSelector(Errors.StakeNotFree.selector, STAKE, STAKE + 1));
        vault.rebond(STAKE + 1);
        vm.stopPrank();
        vm.assertEq(vault.unbonding(provider), STAKE);
    }

    function test_Views_SayWhatIsStored() public view {
        vm.assertEq(address(pools.vault()), address(vault));
        vm.assertEq(address(slasher.pools()), address(pools));
        vm.assertEq(vault.treasury(), treasury);
        vm.assertEq(vault.slashCap(), CAP);
        vm.assertEq(pools.managerOf(pool), manager);
        vm.assertEq(vault.accountOf(provider).committed, STAKE);
        vm.assertEq(work.epochAt(START), START / EPOCH);
        vm.assertEq(pools.endedAt(pool), 0);
    }
}

// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import { Pools } from "../../contracts/src/Pools.sol";
import { PrimeToken } from "../../contracts/src/PrimeToken.sol";
import { StakeVault } from "../../contracts/src/StakeVault.sol";
import { Errors } from "../../contracts/src/libraries/Errors.sol";
import { Invite, NodeConsent } from "../../contracts/src/libraries/Statements.sol";
import { Network } from "./utils/Network.sol";
import { vm } from "./utils/Vm.sol";

contract RegistryTest is Network {
    function setUp() public {
        deployNetwork();
        register(provider, payout);
    }

    function test_Faucet_GivesOnTestNetworksOnly() public {
        vm.prank(stranger);
        token.faucet();
        vm.assertEq(token.balanceOf(stranger), 10_000e18);
        PrimeToken main = new PrimeToken(false, stranger, 7);
        vm.assertEq(main.balanceOf(stranger), 7);
        expect(abi.encodeWithSelector(Errors.NoFaucet.selector));
        main.faucet();
    }

    function test_Wire_OnceAndByDeployerOnly() public {
        expect(abi.encodeWithSelector(Errors.AlreadyWired.selector));
        registry.wire(vault, pools);
        expectNotAllowed(stranger);
        vm.prank(stranger);
        registry.wire(vault, pools);
    }

    function test_RegisterProvider_OnceWithAPayout() public {
        vm.assertTrue(registry.isProvider(provider));
        vm.assertFalse(registry.isProvider(stranger));
        vm.assertEq(registry.payoutOf(provider), payout);
        expect(abi.encodeWithSelector(Errors.AlreadyProvider.selector, provider));
        register(provider, payout);
        expect(abi.encodeWithSelector(Errors.ZeroAddress.selector));
        vm.prank(stranger);
        registry.registerProvider(address(0));
    }

    function test_SetPayout_OnlyTheProviderMovesIt() public {
        vm.prank(provider);
        registry.setPayout(address(0xBEEF));
        vm.assertEq(registry.payoutOf(provider), address(0xBEEF));
        expect(abi.encodeWithSelector(Errors.NotProvider.selector, stranger));
        vm.prank(stranger);
        registry.setPayout(stranger);
        expect(abi.encodeWithSelector(Errors.ZeroAddress.selector));
        vm.prank(provider);
        registry.setPayout(address(0));
    }

    function test_AddNode_BindsBothSides() public {
        addNode(provider, NODE_KEY);
        vm.assertEq(registry.providerOf(node), provider);
    }

    function test_AddNode_RefusesACarrierWhoIsNotTheProvider() public {
        NodeConsent memory c = consent(provider, node);
        bytes memory signature = signed(c, NODE_KEY);
        register(stranger, stranger);
        expectNotAllowed(stranger);
        vm.prank(stranger);
        registry.addNode(c, signature);
    }

    function test_AddNode_RefusesAnUnregisteredProvider() public {
        NodeConsent memory c = consent(stranger, node);
        bytes memory signature = signed(c, NODE_KEY);
        expect(abi.encodeWithSelector(Errors.NotProvider.selector, stranger));
        vm.prank(stranger);
        registry.addNode(c, signature);
    }

    function test_AddNode_RefusesAnotherKeysSignature() public {
        NodeConsent memory c = consent(provider, node);
        bytes memory signature = signed(c, NODE2_KEY);
        bytes32 digest = registry.consentDigest(c);
        expect(abi.encodeWithSelector(Errors.BadSignature.selector, node, digest));
        vm.prank(provider);
        registry.addNode(c, signature);
    }

    function test_AddNode_RefusesAnExpiredConsent_AtTheEdge() public {
        NodeConsent memory c = consent(provider, node);
        bytes memory signature = signed(c, NODE_KEY);
        vm.warp(c.deadline + 1);
        expect(abi.encodeWithSelector(Errors.Expired.selector, c.deadline, c.deadline + 1));
        vm.prank(provider);
        registry.addNode(c, signature);
        vm.warp(c.deadline);
        vm.prank(provider);
        registry.addNode(c, signature);
    }

    function test_AddNode_RefusesATakenNodeAndAUsedConsent() public {
        NodeConsent memory c = consent(provider, node);
        bytes memory signature = signed(c, NODE_KEY);
        vm.startPrank(provider);
        registry.addNode(c, signature);
        expect(abi.encodeWithSelector(Errors.NodeTaken.selector, node, provider));
        registry.addNode(c, signature);
        registry.removeNode(node);
        expect(abi.encodeWithSelector(Errors.ConsentUsed.selector, node, c.salt));
        registry.addNode(c, signature);
        vm.stopPrank();
        addNode(provider, NODE_KEY);
        vm.assertEq(registry.providerOf(node), provider);
    }

    function test_RemoveNode_ByNodeOrProviderOnly() public {
        addNode(provider, NODE_KEY);
        addNode(provider, NODE2_KEY);
        expectNotAllowed(stranger);
        vm.prank(stranger);
        registry.removeNode(node);
        vm.prank(node);
        registry.removeNode(node);
        vm.prank(provider);
        registry.removeNode(node2);
        vm.assertEq(registry.providerOf(node), address(0));
        expect(abi.encodeWithSelector(Errors.UnknownNode.selector, node));
        vm.prank(provider);
        registry.removeNode(node);
    }

    function test_SetRevokedBefore_MovesForwardOnly() public {
        addNode(provider, NODE_KEY);
        vm.prank(provider);
        registry.setRevokedBefore(node, 100);
        vm.prank(node);
        registry.setRevokedBefore(node, 101);
        expect(abi.encodeWithSelector(Errors.RevocationNotLater.selector, 101, 101));
        vm.prank(node);
        registry.setRevokedBefore(node, 101);
        expectNotAllowed(stranger);
        vm.prank(stranger);
        registry.setRevokedBefore(node, 200);
        vm.assertEq(registry.revokedBefore(node), 101);
    }

    // ----------------------------------------------------------------------------------- enroll

    struct Newcomer {
        NodeConsent consent;
        bytes nodeSignature;
        Invite invite;
        bytes managerSignature;
        uint8 v;
        bytes32 r;
        bytes32 s;
    }

    uint256 private constant NEW_KEY = 0x2EE;

    function newcomer(uint256 amount) private returns (Newcomer memory n, address who) {
        who = vm.addr(NEW_KEY);
        n.consent = consent(who, node);
        n.nodeSignature = signed(n.consent, NODE_KEY);
        n.invite = invite(node);
        n.managerSignature = signed(n.invite);
        bytes32 permit = keccak256(
            abi.encode(
                keccak256(
                    "Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"
                ),
                who,
                address(vault),
                amount,
                token.nonces(who),
                block.timestamp
            )
        );
        (n.v, n.r, n.s) = vm.sign(
            NEW_KEY, keccak256(abi.encodePacked("\x19\x01", token.DOMAIN_SEPARATOR(), permit))
        );
    }

    function enroll(Newcomer memory n, address who, uint256 amount) private {
        vm.prank(who);
        registry.enroll(
            who,
            amount,
            block.timestamp,
            n.v,
            n.r,
            n.s,
            n.consent,
            n.nodeSignature,
            n.invite,
            n.managerSignature
        );
    }

    function test_Enroll_TakesANewcomerToASeatInOneTransaction() public {
        (Newcomer memory n, address who) = newcomer(STAKE);
        give(who, STAKE);
        enroll(n, who, STAKE);
        vm.assertTrue(pools.isMember(pool, node));
        vm.assertEq(vault.active(who), STAKE);
        vm.assertEq(vault.committed(who), STAKE);
        vm.assertEq(registry.payoutOf(who), who);
    }

    function test_Enroll_WorksWhenThePermitWasCarriedAhead() public {
        (Newcomer memory n, address who) = newcomer(STAKE);
        give(who, STAKE);
        token.permit(who, address(vault), STAKE, block.timestamp, n.v, n.r, n.s);
        enroll(n, who, STAKE);
        vm.assertEq(vault.active(who), STAKE);
    }

    function test_Enroll_WithoutStakeNeedsItThere() public {
        (Newcomer memory n, address who) = newcomer(STAKE);
        expect(abi.encodeWithSelector(Errors.InsufficientStake.selector, who, 0, STAKE));
        enroll(n, who, 0);
        stake(who, STAKE);
        enroll(n, who, 0);
        vm.assertTrue(pools.isMember(pool, node));
    }

    function test_Enroll_ShowsThePermitsOwnError() public {
        (Newcomer memory n, address who) = newcomer(STAKE);
        give(who, STAKE);
        n.v = n.v == 27 ? 28 : 27;
        vm.expectPartialRevert(bytes4(keccak256("ERC2612InvalidSigner(address,address)")));
        enroll(n, who, STAKE);
        vm.assertEq(token.balanceOf(address(vault)), 2 * BONDS);
    }

    function test_DepositFor_ByTheRegistryOnly() public {
        expectNotAllowed(stranger);
        vm.prank(stranger);
        vault.depositFor(provider, 1, 0, 0, 0, 0);
    }

    function test_Wire_RefusesZero() public {
        PrimeToken t = new PrimeToken(true, address(this), 0);
        StakeVault v = new StakeVault(t, periods(), treasury, CAP, NO_FEED);
        expect(abi.encodeWithSelector(Errors.ZeroAddress.selector));
        v.wire(address(1), address(0), address(2));
        Pools p = new Pools(registry, v);
        expect(abi.encodeWithSelector(Errors.ZeroAddress.selector));
        p.wire(address(0));
    }
}
